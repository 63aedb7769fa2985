"""The coding agent against engines that say what a test wants (``ScriptedGenerator``, a fake); the endpoint, the agent,
its client and the sandbox are real."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.data.templates import CHATML, tokenizer_with
from tests.rollout.multi_turn.scripted import ScriptedGenerator, turns
from vime.config import Args, resolve
from vime.plugins.answers import Identity, generated_samples
from vime.rewards import registry
from vime.rollout.openai_endpoint import generate
from vime.types import Sample, Status

ROOT = Path(__file__).parents[2]
PARAMS = {"max_tokens": 900, "temperature": 1.0, "stop": [], "stop_token_ids": [], "seed": 3}
TASK = {
    "public_tests": ["assert f(2, 3) == 5", "assert f(0, 1) == 1"],
    "tests": ["assert f(7, 7) == 14", "assert f(-1, 1) == 0"],
}


def block(body: str) -> str:
    return f"```python\ndef f(a, b):\n    {body}\n```<|im_end|>"


async def played(folder: Path, *said: str, max_tokens: int = 900) -> tuple[Sample, str]:
    """The sample, and what of it is trained."""
    tokenizer = tokenizer_with(CHATML)
    tokenizer.save_pretrained(folder)
    values: dict[str, Any] = {"hf_checkpoint": str(folder), "trust_remote_code": False, "max_context_tokens": 2048}
    values |= {"apply_chat_template_kwargs": {}, "rollout_skip_special_tokens": False, "agent_command": None}
    values |= {"agent_function_path": "examples.coding_agent_rl.coding_agent:solve", "agent_timeout_s": 60.0}
    values |= {"agent_samples": "all", "agent_sampling": "refuse", "agent_call_format": None}
    values |= {"reward_key": None, "eval_reward_key": None, "agent_max_transcripts": 64}
    values |= {"agent_host": "127.0.0.1", "agent_port": 0, "agent_advertise": None}
    values |= {"generator": ScriptedGenerator(tokenizer, turns(*said))}
    drawn = Sample(index=0, group_index=0, prompt="Write f.", metadata=dict(TASK), session_id="s")
    answer = await generate(Args(values), drawn, {**PARAMS, "max_tokens": max_tokens})
    (sample,) = generated_samples(answer, Identity.of(drawn))
    response = zip(sample.tokens[sample.prompt_length :], sample.loss_mask or (), strict=True)
    return sample, tokenizer.decode([token for token, bit in response if bit])


async def score(sample: Sample) -> float | None:
    """In a thread, as the grader has an event loop of its own."""
    grade = await asyncio.to_thread(registry.load("code"), sample.response, sample.label, sample.metadata)
    return grade.score


async def test_it_corrects_what_the_tests_find(tmp_path: Path) -> None:
    wrong, hangs, right = block("return a - b"), block("while True: pass"), block("return a + b")
    sample, trained = await played(tmp_path, "Hm.<|im_end|>", wrong, hangs, right)
    assert trained == "Hm.<|im_end|>" + wrong + hangs + right
    assert "There is no finished block of code." in sample.response
    assert "It fails:\nassert f(2, 3) == 5\nAssertionError\nCorrect it." in sample.response
    assert "It was stopped (timeout)." in sample.response
    assert (sample.status, sample.metadata["passed_public_tests"]) == (Status.COMPLETED, True)
    assert await score(sample) == 1.0


async def test_it_stops_at_the_first_program_that_passes_and_others_grade_it(tmp_path: Path) -> None:
    learnt_by_heart = block("return 5 if a else 1")
    sample, trained = await played(tmp_path, learnt_by_heart)
    assert trained == learnt_by_heart
    assert (sample.metadata["passed_public_tests"], await score(sample)) == (True, 0.0)


async def test_it_gives_up_after_its_turns_or_when_there_is_no_room(tmp_path: Path) -> None:
    sample, trained = await played(tmp_path, block("return 0"))
    assert (trained, sample.status) == (block("return 0") * 4, Status.COMPLETED)
    assert (sample.metadata["passed_public_tests"], await score(sample)) == (False, 0.0)
    sample, trained = await played(tmp_path, block("return 0"), max_tokens=60)
    assert (trained, sample.status) == (block("return 0"), Status.TRUNCATED)


def test_its_tasks_are_right_for_programs_that_do_what_they_say(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.coding_agent_rl.tasks", str(tmp_path), "--count", "40"]
    subprocess.run(command, cwd=ROOT, check=True)
    rows = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    sums = [row for row in rows if "the sum of a and b, and 3 more" in row["prompt"][-1]["content"]]
    assert sums
    tests = sums[0]["metadata"]
    assert (len(tests["public_tests"]), len(tests["tests"])) == (2, 4)
    for test in tests["public_tests"] + tests["tests"]:
        exec(test, {"f": lambda a, b: a + b + 3})


@pytest.mark.parametrize(("kind", "model"), [("cpu", "smollm2-135M"), ("gpu", "qwen3-4B")])
def test_its_flags_are_right_for_its_model(kind: str, model: str, tmp_path: Path) -> None:
    """Only files are missing here."""
    public = json.loads((ROOT / "tests" / "models" / "public_configs" / f"{model}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(public["config"]))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    config = ROOT / "examples" / "coding_agent_rl" / f"{kind}.yaml"
    resolution = resolve(["--config", str(config), "--hf-checkpoint", str(tmp_path)])
    assert [line for line in resolution.violations if ": no such" not in line] == []
