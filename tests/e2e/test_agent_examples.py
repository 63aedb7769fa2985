"""The examples of agents as their READMEs run them, smaller: SmolLM2 on the real stack, tools included."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import ROOT, Run, has_signal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = ["--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--num-rollout", "2"]


def check(name: str, folder: Path, *further: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Runs an example for two rollouts and returns its samples and its metrics."""
    assert (ROOT / "models/SmolLM2-135M-Instruct").is_dir(), "make models/SmolLM2-135M-Instruct/model.safetensors"
    subprocess.run([sys.executable, "-m", f"examples.{name}.tasks", str(folder)], cwd=ROOT, check=True)
    flags = ["--config", f"examples/{name}/cpu.yaml", "--prompt-data", str(folder / "tasks.jsonl"), *SMALL, *further]
    with Run(folder / "run", *flags) as run:
        run.finish()
        run.assert_nothing_is_left()
    rows = [row for row in run.rows() if "train/loss" in row]
    rollouts = [run.samples(rollout_id) for rollout_id in range(2)]
    turns = [[len(sample["metadata"]["multi_turn"]["turns"]) for sample in rollout] for rollout in rollouts]
    assert [row["rollout/multi_turn/turns/mean"] for row in rows] == pytest.approx([statistics.mean(n) for n in turns])
    assert [row["train/grad_norm"] > 0 for row in rows] == [has_signal(rollout) for rollout in rollouts]
    samples = [sample for rollout in rollouts for sample in rollout]
    called = [sample for sample in samples if sample["metadata"]["multi_turn"]["tool_calls"]]
    assert any(len(sample["metadata"]["multi_turn"]["turns"]) > 1 for sample in called), "the prompt shows how to call"
    return samples, rows


def test_retool_trains_on_what_its_model_said(tmp_path: Path) -> None:
    samples, _ = check("retool", tmp_path)
    assert len(samples) == 16


def test_search_tool_goes_on_with_episodes_that_were_interrupted(tmp_path: Path) -> None:
    samples, rows = check("search_tool", tmp_path, "--over-sampling-batch-size", "4", "--partial-rollout")
    assert len(samples) == 16
    assert sum(row["rollout/samples/continued"] for row in rows) > 0
    assert {sample["status"] for sample in samples} <= {"completed", "truncated"}


def test_multi_agent_trains_two_samples_for_each_that_is_drawn(tmp_path: Path) -> None:
    samples, _ = check("multi_agent", tmp_path)
    assert Counter(sample["metadata"]["role"] for sample in samples) == {"planner": 16, "executor": 16}
