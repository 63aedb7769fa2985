"""examples/coding_agent_rl as its README runs it, smaller: SmolLM2 on the real stack, endpoint and sandbox included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import ROOT, Run, has_signal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = ["--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--num-rollout", "2"]


def test_the_agent_trains_on_what_its_model_said(tmp_path: Path) -> None:
    assert (ROOT / "models/SmolLM2-135M-Instruct").is_dir(), "make models/SmolLM2-135M-Instruct/model.safetensors"
    tasks = [sys.executable, "-m", "examples.coding_agent_rl.tasks", str(tmp_path), "--terms", "4"]
    subprocess.run(tasks, cwd=ROOT, check=True)
    flags = ["--config", "examples/coding_agent_rl/cpu.yaml", "--prompt-data", str(tmp_path / "tasks.jsonl"), *SMALL]
    with Run(tmp_path / "run", *flags) as run:
        run.finish()
        run.assert_nothing_is_left()
    rows = [row for row in run.rows() if "train/loss" in row]
    rollouts = [run.samples(rollout_id) for rollout_id in range(2)]
    samples = [sample for rollout in rollouts for sample in rollout]
    # only groups whose rewards differ tell which answers are better
    assert len(rows) == 2 and any(map(has_signal, rollouts))
    assert [row["train/grad_norm"] > 0 for row in rows] == [has_signal(rollout) for rollout in rollouts]
    assert len(samples) == 16
    assert all(0 <= sample["reward"] <= 1 for sample in samples)
    assert any(sample["reward"] > 0 for sample in samples), "an example in the prompt shows how to answer"
    assert any(len(sample["metadata"]["multi_turn"]["turns"]) > 1 for sample in samples)
