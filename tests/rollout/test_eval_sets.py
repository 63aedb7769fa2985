"""Evaluation sets that differ from rollouts and from each other, over fake engines."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.config.conftest import flags, model_dir, prompt_file  # noqa: F401
from tests.rollout.fakes import FakeGenerator, FakeRecorder, FakeSource
from tests.tiny import make_tokenizer
from vime.config import parse_config
from vime.config.eval_datasets import EvalDataset, eval_datasets
from vime.data.chat import PromptEncoder
from vime.errors import UserError
from vime.plugins import resolve_hooks
from vime.rewards.hub import RewardHub
from vime.rollout.build import Prompts, make_hub, make_manager
from vime.rollout.eval_sets import load_eval_inputs
from vime.rollout.staleness import WeightHistory
from vime.types import Grade, Sample

HERE = __name__


async def seven(args, sample):
    return {"points": 7.0, "half": 3.5}


async def rank(args, samples):
    return [float(place) for place, _ in enumerate(samples)]


async def two_words(args, sample, sampling_params, evaluation=False):
    sample.tokens, sample.response_length, sample.response = [1, 2, 3], 2, f"two words {evaluation}"
    sample.status = Sample.Status.COMPLETED
    return sample


class Pool:
    """Gives 1 and remembers which grader was asked about what."""

    def __init__(self):
        self.asked = []

    async def grade(self, rm_type, response, label, metadata):
        self.asked.append((rm_type, label, metadata))
        return Grade(score=1.0, extra={"recall": 0.25} if rm_type == "f1" else {})

    async def close(self): ...


@pytest.fixture
def config_of(flags, tmp_path):  # noqa: F811
    """The configuration of a run with these evaluation sets, each of two prompts."""
    rows = [{"input": f"p{i}", "q": f"q{i}", "label": str(i), "a": f"a{i}", "extra": {"i": i}} for i in range(2)]
    file = tmp_path / "set.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(text, *words):
        path = tmp_path / "eval.yaml"
        path.write_text(text.replace("FILE", str(file)))
        return parse_config(flags("--eval-interval", "1", "--eval-config", str(path), *words))

    return make


def manager_of(config):
    tokenizer, hooks, generator, recorder, pool = (
        make_tokenizer(),
        resolve_hooks(config),
        FakeGenerator(),
        FakeRecorder(),
        Pool(),
    )
    prompts = Prompts(
        hooks=hooks,
        tokenizer=tokenizer,
        encoder=PromptEncoder(tokenizer),
        source=FakeSource(),
        eval_sources=load_eval_inputs(config, hooks, tokenizer),
        max_context=64,
    )
    hub = make_hub(config, prompts, config.args, pool)
    assert isinstance(hub, RewardHub)
    manager = make_manager(config, prompts, config.args, generator, hub, recorder, WeightHistory())
    return manager, generator, recorder, pool


async def test_each_set_samples_as_it_says(config_of):
    config = config_of(
        """
        eval:
          defaults: {n_samples_per_eval_prompt: 2, temperature: 0.5, stop: [END]}
          datasets:
            - {name: a, path: FILE}
            - {name: b, path: FILE, temperature: 0, top_p: 0.9, top_k: 5, max_response_len: 3, min_new_tokens: 2,
               stop: [], stop_token_ids: [7, 8], n_samples_per_eval_prompt: 1}
            - {name: c, path: FILE, max_context_len: 6}
        """,
        *("--eval-max-response-len", "9"),
    )
    manager, generator, recorder, _ = manager_of(config)
    metrics = await manager.evaluate(0)
    by_set = [params for _, params, _ in generator.requests]
    assert [len(recorder.recorded[f"eval_{name}-0"]) for name in "abc"] == [4, 2, 4]
    first, second, third = by_set[0], by_set[4], by_set[6]
    assert (first.temperature, first.max_tokens, first.stop, first.top_p) == (0.5, 9, ("END",), 1.0)
    assert (second.temperature, second.top_p, second.top_k, second.max_tokens) == (0.0, 0.9, 5, 3)
    assert (second.min_tokens, second.stop, second.stop_token_ids) == (2, (), (7, 8))
    assert third.max_tokens == 6 - len(generator.requests[6][0]), "prompt and response have 6 tokens together"
    assert metrics["eval/a-pass@2"] == 1.0 and "eval/b-pass@1" not in metrics


async def test_each_set_is_graded_as_it_says(config_of):
    config = config_of(
        f"""
        eval:
          datasets:
            - {{name: run, path: FILE}}
            - {{name: rule, path: FILE, rm_type: boxed_math}}
            - {{name: overlap, path: FILE, rm_type: f1}}
            - {{name: part, path: FILE, rm_type: f1, reward_key: recall}}
            - {{name: own, path: FILE, custom_rm_path: "{HERE}:seven", reward_key: half}}
            - {{name: group, path: FILE, custom_rm_path: "{HERE}:rank", group_rm: true, n_samples_per_eval_prompt: 3,
                reward_key: null}}
        """,
        *("--custom-rm-path", f"{HERE}:seven", "--reward-key", "points"),
    )
    manager, _, _, pool = manager_of(config)
    metrics = await manager.evaluate(0)
    assert metrics["eval/run"] == 7.0
    assert metrics["eval/rule"] == 1.0 and {asked[0] for asked in pool.asked} == {"boxed_math", "f1"}
    assert (metrics["eval/overlap"], metrics["eval/part"]) == (1.0, 0.25), "the run's key is that of its function"
    assert metrics["eval/own"] == 3.5
    assert metrics["eval/group"] == 1.0, "0, 1 and 2 of each group"


async def test_each_set_reads_rows_as_it_says(config_of):
    config = config_of(
        """
        eval:
          datasets:
            - {name: plain, path: FILE, rm_type: dapo}
            - {name: keys, path: FILE, input_key: q, label_key: a, metadata_key: extra,
               metadata_overrides: {i: 9, j: [1]}}
        """
    )
    manager, _, recorder, pool = manager_of(config)
    await manager.evaluate(0)
    assert [s.prompt for s in recorder.recorded["eval_plain-0"]] == ["p0", "p1"]
    assert [s.prompt for s in recorder.recorded["eval_keys-0"]] == ["q0", "q1"]
    asked = sorted(pool.asked, key=lambda each: each[:2])  # answers finish in any order
    assert asked[:2] == [("dapo", "0", {}), ("dapo", "1", {})]
    assert asked[2:] == [("math", f"a{i}", {"i": 9, "j": [1]}) for i in (0, 1)]


async def test_a_set_may_be_generated_by_a_function_of_its_own_or_by_none(config_of):
    config = config_of(
        f"""
        eval:
          datasets:
            - {{name: own, path: FILE, custom_generate_function_path: "{HERE}:two_words"}}
            - {{name: usual, path: FILE, custom_generate_function_path: null}}
        """,
        *("--custom-generate-function-path", f"{HERE}:two_words"),
    )
    manager, generator, recorder, _ = manager_of(config)
    await manager.evaluate(0)
    assert {s.response for s in recorder.recorded["eval_own-0"]} == {"two words True"}
    assert len(generator.requests) == 2, "of the set without"


def test_a_function_of_a_set_that_cannot_be_used_is_told_before_anything_starts(config_of):
    config = config_of(f'eval: {{datasets: [{{name: a, path: FILE, custom_rm_path: "{HERE}:sevn"}}]}}')
    with pytest.raises(UserError, match=r"--eval-config .*eval.yaml: a: custom_rm_path.*sevn.*did you mean"):
        load_eval_inputs(config, resolve_hooks(config), make_tokenizer())


def test_the_page_names_all_that_a_set_can_say():
    text = (Path(__file__).resolve().parents[2] / "docs" / "en" / "advanced" / "evaluation.md").read_text(
        encoding="utf-8"
    )
    table = text.partition("| of a set |")[2].partition("\n\n")[0]
    assert {f"`{each.name}`" for each in dataclasses.fields(EvalDataset)} <= set(re.findall(r"`\w+`", table))


def test_what_a_set_says_goes_before_defaults_and_flags(config_of):
    config = config_of(
        """
        eval:
          defaults: {rm_type: dapo, top_p: 0.5}
          datasets: [{name: a, path: FILE, rm_type: deepscaler}, {name: b, path: FILE, top_p: 1e-1}]
        """,
        *("--custom-rm-path", f"{HERE}:seven", "--group-rm", "--eval-max-context-len", "40"),
    )
    first, second = eval_datasets(config)
    assert (first.rm_type, first.custom_rm_path, first.group_rm, first.top_p) == ("deepscaler", None, False, 0.5)
    assert (second.rm_type, second.custom_rm_path, second.top_p) == ("dapo", None, 0.1)
    assert first.max_context_len == second.max_context_len == 40
