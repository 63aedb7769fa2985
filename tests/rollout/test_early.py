"""What ``vime explain`` says of the data of a run, and that the start of a run says the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_model
from vime.config import resolve
from vime.errors import UserError
from vime.rollout import early
from vime.rollout.build import load_prompts
from vime.rollout.early import data_problems
from vime.rollout.sft import load_dialogues

MESSAGES = [{"role": "user", "content": "1 + 1?"}]
ANSWERED = [*MESSAGES, {"role": "assistant", "content": "2"}]

Words = Callable[..., list[str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("early") / "model")


@pytest.fixture
def words(model: Path, tmp_path: Path) -> Words:
    """Flags of a run over these prompts, and further ones."""

    def make(prompts: list[Any], *extra: str) -> list[str]:
        path = tmp_path / "train.jsonl"
        path.write_text("".join(json.dumps({"input": each, "label": "2"}) + "\n" for each in prompts))
        flags = f"""--hf-checkpoint {model} --prompt-data {path} --label-key label --rm-type math --num-rollout 1
            --rollout-batch-size 4 --n-samples-per-prompt 2 --rollout-max-response-len 8 --colocate
            --actor-num-gpus-per-node 1"""
        return [*flags.split(), *extra]

    return make


def said_by_both(flags: list[str]) -> list[str]:
    resolution = resolve(flags)
    assert resolution.violations == ()
    problems = data_problems(resolution.config, flags_are_right=True)
    with pytest.raises(UserError) as caught:
        load_prompts(resolution.config)
    assert str(caught.value).splitlines() == problems
    return problems


def test_a_wrong_input_key(words: Words, tmp_path: Path) -> None:
    (problem,) = said_by_both(words(["1 + 1?"], "--input-key", "question"))
    assert "no key 'question' (--input-key), only ['input', 'label']" in problem


def test_prompts_that_are_all_too_long_and_the_flag_that_the_limit_comes_from(words: Words, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    prompts = ["1 + 1 = " * 20] * 3
    assert said_by_both(words(prompts, "--vllm-max-model-len", "20")) == [
        f"{path}: all 3 prompts have over 19 tokens (--vllm-max-model-len 20, with one token to answer)"
    ]
    assert said_by_both(words(prompts, "--rollout-max-context-len", "20", "--vllm-max-model-len", "30")) == [
        f"{path}: all 3 prompts have over 19 tokens (--rollout-max-context-len 20, with one token to answer)"
    ]
    assert said_by_both(words(prompts, "--rollout-max-prompt-len", "9")) == [
        f"{path}: all 3 prompts have over 9 tokens (--rollout-max-prompt-len)"
    ]
    assert said_by_both(words(["1 " * 600])) == [
        f"{path}: all 1 prompts have over 511 tokens (max_position_embeddings of the model 512, with one token to "
        "answer)"
    ]


def test_messages_need_the_chat_template(words: Words, tmp_path: Path) -> None:
    assert said_by_both(words(["1 + 1?", MESSAGES])) == [
        f"{tmp_path / 'train.jsonl'}:2: the prompt is a list of messages: set --apply-chat-template, or generate by "
        "--custom-generate-function-path"
    ]
    config = resolve(words([MESSAGES], "--apply-chat-template")).config
    assert data_problems(config, flags_are_right=True) == []
    assert load_prompts(config)


def test_messages_are_fine_for_a_function_that_generates(words: Words) -> None:
    own = ("--custom-generate-function-path", "examples.plugins.generation:one_turn")
    assert data_problems(resolve(words([MESSAGES], *own)).config, flags_are_right=True) == []


def test_a_template_that_refuses_the_prompts(words: Words, model: Path, tmp_path: Path) -> None:
    strict = tmp_path / "strict"
    shutil.copytree(model, strict)
    (strict / "chat_template.jinja").write_text("{{ raise_exception('a system message must come first') }}")
    (problem,) = said_by_both(words([MESSAGES], "--apply-chat-template", "--hf-checkpoint", str(strict)))
    assert problem.startswith("the chat template refuses the prompt: ") and problem.endswith("must come first")


def test_sets_for_evaluation_are_looked_at(words: Words, tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({"input": MESSAGES, "label": "2"}) + "\n")
    (problem,) = said_by_both(words(["1"], "--eval-interval", "1", "--eval-prompt-data", "held_out", str(path)))
    assert problem.startswith(f"{path}:1: the prompt is a list of messages")


def test_rows_are_read_where_flags_are_wrong_too(words: Words) -> None:
    resolution = resolve(words([""], "--lr", "x"))
    assert len(resolution.violations) == 1
    (problem,) = data_problems(resolution.config, flags_are_right=False)
    assert problem.endswith(":1: input: is empty")


def test_what_rules_say_already_is_not_said_again() -> None:
    resolution = resolve(["--prompt-data", "nowhere.jsonl", "--eval-prompt-data", "a", "nowhere.jsonl"])
    assert data_problems(resolution.config, flags_are_right=False) == []


def test_the_tokenizer_is_loaded_only_where_it_can_say_something(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(early, "load_tokenizer", refuse)
    assert data_problems(resolve(words(["1 + 1?"] * 5)).config, flags_are_right=True) == []
    with pytest.raises(AssertionError, match="loaded"):
        data_problems(resolve(words(["1 + 1?"], "--rollout-max-prompt-len", "9")).config, flags_are_right=True)


@pytest.mark.parametrize(
    ("messages", "flags", "problem"),
    [
        (MESSAGES, [], ":1: there is no message of the assistant to train on"),
        (ANSWERED, ["--label-key", "answer"], ": no row has a label under the key 'answer'"),
    ],
)
def test_dialogues(words: Words, messages: list[Any], flags: list[str], problem: str) -> None:
    given = words([messages])[:4]
    further = ["--loss-type", "sft_loss", "--rollout-batch-size", "1", "--num-rollout", "1"]
    resolution = resolve([*given, *further, "--actor-num-gpus-per-node", "1", *flags])
    assert resolution.violations == ()
    (said,) = data_problems(resolution.config, flags_are_right=True)
    assert said.startswith(f"{given[3]}{problem}")
    with pytest.raises(UserError) as caught:
        load_dialogues(resolution.config)
    assert str(caught.value) == said
