"""The examples of agents against engines that say what a test wants (``ScriptedGenerator``, a fake); tools are real."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.multi_agent import multi_agent
from examples.multi_agent.calculator import calculate
from examples.retool import retool
from examples.search_tool import search_tool
from tests.data.templates import CHATML, tokenizer_with
from tests.rollout.multi_turn.scripted import Script, ScriptedGenerator, turns
from vime.config import Args, resolve
from vime.plugins.answers import Identity, generated_samples
from vime.types import Sample, Status

ROOT = Path(__file__).parents[2]
NAMES = ("retool", "search_tool", "multi_agent")
PARAMS = {"max_tokens": 400, "temperature": 1.0, "stop": [], "stop_token_ids": [], "seed": 3}


@pytest.fixture(scope="module")
def args_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Script], Args]:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tokenizer_with(CHATML)
    tokenizer.save_pretrained(folder)
    values = {"hf_checkpoint": str(folder), "trust_remote_code": False, "max_context_tokens": 2048, "tool_key": "tools"}
    values |= {"apply_chat_template": False, "apply_chat_template_kwargs": {}, "rollout_skip_special_tokens": True}
    return lambda script: Args({**values, "generator": ScriptedGenerator(tokenizer, script)})


def rows(name: str, folder: Path) -> list[dict[str, Any]]:
    """Of the example's task, written as its README says."""
    subprocess.run([sys.executable, "-m", f"examples.{name}.tasks", str(folder)], cwd=ROOT, check=True)
    return [json.loads(line) for line in (folder / "tasks.jsonl").read_text().splitlines()]


def drawn(row: dict[str, Any]) -> Sample:
    return Sample(index=0, group_index=0, prompt=row["prompt"], label=row["label"], session_id="s")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call><|im_end|>"


def trained(sample: Sample, args: Args) -> str:
    response = zip(sample.tokens[sample.prompt_length :], sample.loss_mask or (), strict=True)
    text: str = tokenizer_with(CHATML).decode([token for token, bit in response if bit])
    return text


async def test_retool_computes_in_the_sandbox(args_with: Callable[[Script], Args], tmp_path: Path) -> None:
    row = rows("retool", tmp_path)[0]
    question = row["prompt"][-1]["content"]
    said = [call("python", code=f"print({question[8:-1]})"), f"It is {row['label']}.<|im_end|>"]
    args = args_with(turns(*said))
    sample = await retool.generate(args, drawn(row), PARAMS)
    assert trained(sample, args) == "".join(said)
    assert f"tool\n{row['label']}\n" in sample.response
    assert await retool.reward(args, sample) == 1.0


async def test_retool_tells_the_model_how_its_program_ended(
    args_with: Callable[[Script], Args], tmp_path: Path
) -> None:
    row = rows("retool", tmp_path)[0]
    said = [call("python", code="1 / 0"), call("python", code="x = 1"), f"{row['label']}1<|im_end|>"]
    args = args_with(turns(*said))
    sample = await retool.generate(args, drawn(row), PARAMS)
    assert "ZeroDivisionError: division by zero" in sample.response
    assert "The program printed nothing." in sample.response
    assert await retool.reward(args, sample) == 0.0


async def test_retool_does_not_reward_what_only_the_tool_said(
    args_with: Callable[[Script], Args], tmp_path: Path
) -> None:
    row = rows("retool", tmp_path)[0]
    args = args_with(turns(call("python", code=f"print({row['label']})"), "I see.<|im_end|>"))
    sample = await retool.generate(args, drawn(row), PARAMS)
    assert row["label"] in sample.response and await retool.reward(args, sample) == 0.0


async def test_every_question_of_search_tool_is_answered_by_what_its_search_finds(
    args_with: Callable[[Script], Args], tmp_path: Path
) -> None:
    found = rows("search_tool", tmp_path)
    assert len(found) == 160
    for row in found:
        assert row["label"] in await search_tool.search(row["prompt"][-1]["content"])


async def test_search_tool_looks_up_and_answers(args_with: Callable[[Script], Args], tmp_path: Path) -> None:
    row = rows("search_tool", tmp_path)[0]
    said = [call("search", query=row["prompt"][-1]["content"]), f"It is {row['label'].upper()}.<|im_end|>"]
    args = args_with(turns(*said))
    sample = await search_tool.generate(args, drawn(row), PARAMS)
    assert trained(sample, args) == "".join(said)
    assert await search_tool.reward(args, sample) == 1.0


async def test_who_recites_an_entry_has_not_answered() -> None:
    entry = "Arlen is a village on the river Tov. Its people grow hemp. Its fair is in May."
    assert await search_tool.reward(None, Sample(label="hemp", response=entry)) == 0.0
    assert await search_tool.reward(None, Sample(label="hemp", response="People grow hemp there.")) == 1.0
    assert await search_tool.reward(None, Sample(label="Mira Holt", response="Holt, Mira")) == 0.0
    assert await search_tool.search("xyzzy") == "Nothing was found."


async def test_planner_and_executor_are_two_samples_with_one_outcome(
    args_with: Callable[[Script], Args], tmp_path: Path
) -> None:
    row = rows("multi_agent", tmp_path)[0]
    plan, use, answer = "2 * 3 + 1<|im_end|>", call("calculate", expression="2 * 3 + 1"), f"{row['label']}<|im_end|>"
    args = args_with(turns(plan, use, answer))
    sample = drawn(row)
    before = sample.copy()
    children = await multi_agent.generate(args, sample, PARAMS)
    assert sample == before
    planner, executor = generated_samples(children, Identity.of(sample))
    assert (trained(planner, args), trained(executor, args)) == (plan, use + answer)
    assert tokenizer_with(CHATML).decode(executor.tokens).count("Plan: 2 * 3 + 1<|im_end|>") == 1
    assert "tool\n7\n" in executor.response
    assert [await multi_agent.reward(args, each) for each in (planner, executor)] == [1.0, 1.0]
    seeds = [params.seed for _, params in args.generator.requests["s"]]
    assert len(set(seeds)) == 3


async def test_roles_that_are_interrupted_begin_anew(args_with: Callable[[Script], Args], tmp_path: Path) -> None:
    row = rows("multi_agent", tmp_path)[0]
    args = args_with(turns("1 + 1<|im_end|>"))
    args.generator.aborts.add(0)
    interrupted = await multi_agent.generate(args, drawn(row), PARAMS)
    assert isinstance(interrupted, Sample) and interrupted.status is Status.ABORTED
    children = await multi_agent.generate(args, interrupted, PARAMS)
    assert isinstance(children, list) and [each.status for each in children] == [Status.COMPLETED] * 2
    prompts = [tokenizer_with(CHATML).decode(each.tokens[: each.prompt_length]) for each in children]
    (question, planner), (plan, executor) = (
        (text.split("<|im_start|>user\n")[-1], text.split("<|im_end|>")[0]) for text in prompts
    )
    assert question.startswith(row["prompt"]) and planner.endswith(multi_agent.PLANNER[0]["content"])
    assert plan.startswith("Plan: 1 + 1<|im_end|>") and executor.endswith(multi_agent.EXECUTOR[0]["content"])


@pytest.mark.parametrize(
    ("expression", "value"), [("12 * 5 + 7", "67"), (" (1 + 2) / 4 ", "0.75"), ("-3 - 0.5", "-3.5"), ("6 / 3", "2")]
)
async def test_the_calculator(expression: str, value: str) -> None:
    assert await calculate(expression) == value


@pytest.mark.parametrize("expression", ["2 ** 9", "print(1)", "True", "1 / 0", "x", "1" * 201, "", "1e999", "[1]"])
async def test_the_calculator_reads_nothing_else(expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError, ZeroDivisionError)):
        await calculate(expression)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("kind", "model"), [("cpu", "smollm2-135M"), ("gpu", "qwen3-4B")])
def test_the_flags_of_an_example_are_right_for_its_model(name: str, kind: str, model: str, tmp_path: Path) -> None:
    """Only files are missing here."""
    public = json.loads((ROOT / "tests" / "models" / "public_configs" / f"{model}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(public["config"]))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    config = ROOT / "examples" / name / f"{kind}.yaml"
    resolution = resolve(["--config", str(config), "--hf-checkpoint", str(tmp_path)])
    assert [line for line in resolution.violations if ": no such" not in line] == []
    assert resolution.config.args.custom_generate_function_path == f"examples.{name}.{name}.generate"
