"""The examples of agents as their READMEs run them, smaller: SmolLM2 on the real stack, tools included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import ROOT, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = ["--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--num-rollout", "2"]


@pytest.mark.parametrize(("name", "of_each"), [("retool", 1), ("search_tool", 1), ("multi_agent", 2)])
def test_an_example_trains_on_what_its_model_said(name: str, of_each: int, tmp_path: Path) -> None:
    assert (ROOT / "models/SmolLM2-135M-Instruct").is_dir(), "make models/SmolLM2-135M-Instruct/model.safetensors"
    subprocess.run([sys.executable, "-m", f"examples.{name}.tasks", str(tmp_path)], cwd=ROOT, check=True)
    flags = ["--config", f"examples/{name}/cpu.yaml", "--prompt-data", str(tmp_path / "tasks.jsonl"), *SMALL]
    with Run(tmp_path / "run", *flags) as run:
        run.finish()
        run.assert_nothing_is_left()
    rows = [row for row in run.rows() if "train/loss" in row]
    assert len(rows) == 2 and all(row["train/grad_norm"] >= 0 for row in rows)
    assert all(row["rollout/multi_turn/turns/mean"] >= 1 for row in rows)
    samples = [sample for rollout_id in range(2) for sample in run.samples(rollout_id)]
    assert len(samples) == 16 * of_each
    called = [sample for sample in samples if sample["metadata"]["multi_turn"]["tool_calls"]]
    assert called, "two examples in the prompt show how to call"
    assert any(len(sample["metadata"]["multi_turn"]["turns"]) > 1 for sample in called)
