"""Whole runs of fine-tuning on given dialogues: Ray and Megatron-core, and no engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import ROOT, Run
from tests.tiny import make_model

pytestmark = pytest.mark.timeout(900)

ENGINES = ("openai.api_server", "vllm-router", "vllm_router")
METRICS = ("train/loss", "train/grad_norm", "train/lr", "rollout/trained_tokens", "rollout/total_len/mean")
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"


def dialogues() -> list[dict[str, Any]]:
    """Questions with their answers; every third is a dialogue of two turns, the first of which is not trained."""
    rows = []
    for a in range(1, 6):
        for b in range(1, 4):
            turns = [
                {"role": "user", "content": f"What is {a} + {b}?"},
                {"role": "assistant", "content": f"The answer is {a + b}."},
            ]
            before = [
                {"role": "user", "content": "Add these numbers."},
                {"role": "assistant", "content": "one two three", "step_loss_mask": 0},
                {"role": "tool", "content": f"{a} {b}"},
            ]
            rows.append({"messages": [*before, *turns] if (a + b) % 3 == 0 else turns})
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_resumed_run_goes_on_exactly_and_no_engine_is_ever_started(tmp_path: Path) -> None:
    """Six rollouts of two steps at once, and the last three again from the checkpoint after the third: the same rows,
    losses and gradients, bit for bit. The rollouts go through the data more than twice, in another order each time."""
    data = write_rows(tmp_path / "train.jsonl", dialogues())
    held = write_rows(tmp_path / "held.jsonl", dialogues()[:5])
    flags = [
        *("--loss-type", "sft_loss", "--calculate-per-token-loss", "--disable-compute-advantages-and-returns"),
        *("--debug-train-only", "--hf-checkpoint", str(make_model(tmp_path / "model", tied=True))),
        *("--prompt-data", str(data), "--input-key", "messages", "--rollout-shuffle"),
        *("--num-rollout", "6", "--rollout-batch-size", "6", "--num-steps-per-rollout", "2", "--save-interval", "3"),
        *("--eval-prompt-data", "held", str(held), "--eval-interval", "3"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "128"),
        *("--actor-num-gpus-per-node", "1", "--fp32", "--lr", "1e-2", "--lr-decay-style", "linear"),
    ]
    with Run(tmp_path / "whole", *flags) as whole:
        whole.wait_for(lambda: len(whole.rows()) >= 1, "the first evaluation")
        assert [name for name in ENGINES if whole.named(name)] == []
        whole.finish()
        whole.assert_nothing_is_left()
    assert not (whole.save / "logs").exists(), "engines and routers would log there"
    assert ": sync" not in whole.output()

    with Run(tmp_path / "resumed", *flags, "--load", str(whole.save), "--ckpt-step", "2") as resumed:
        resumed.finish()

    first, second = train_rows(whole)[6:], train_rows(resumed)
    assert [row["rollout_id"] for row in second] == [3, 3, 4, 4, 5, 5]
    for a, b in zip(first, second, strict=True):
        assert {key: a[key] for key in METRICS if key in a} == {key: b[key] for key in METRICS if key in b}

    losses = [row["eval/held-loss"] for row in whole.rows() if "eval/held-loss" in row]
    assert len(losses) == 3
    assert losses[0] > 5 > 2 > losses[1] > losses[2]
    assert resumed.rows()[-1]["eval/held-loss"] == losses[-1]
    assert first[-1]["perf/actor_train_tokens_per_s"] > 0


@pytest.mark.slow
def test_the_script_teaches_a_language_model_to_add(tmp_path: Path) -> None:
    """The loss on operand pairs that it never saw falls from above 4 nats a token to below 1, in a minute or two."""
    assert SMOLLM2.is_dir(), "make models/SmolLM2-135M-Instruct/model.safetensors"
    task, run = tmp_path / "task", tmp_path / "run"
    subprocess.run([sys.executable, "tools/make_arithmetic.py", str(task)], cwd=ROOT, check=True)
    environment = {**os.environ, "TASK": str(task), "RUN": str(run), "PYTHON": sys.executable}
    script = ["bash", "scripts/run-smollm2-135M-sft-cpu.sh"]
    done = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["eval/held-out-loss"] for row in rows if "eval/held-out-loss" in row]
    assert losses[0] > 4
    assert losses[-1] < 1
    trained = [row["train/loss"] for row in rows if "train/loss" in row]
    assert trained[-1] < trained[0] / 2


def train_rows(run: Run) -> list[dict[str, Any]]:
    return [row for row in run.rows() if "train/loss" in row]
