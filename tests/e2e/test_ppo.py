"""Whole runs of PPO: a critic beside the actor, on the real stack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import ROOT, Run
from vime.checkpoints import CRITIC

pytestmark = pytest.mark.timeout(900)  # whole runs on a busy machine; each wait has a deadline of its own

PPO = ["--advantage-estimator", "ppo", "--critic-lr", "1e-2", "--value-clip", "10"]
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"
KL = ["--kl-coef", "0.05", "--kl-loss-type", "k3"]


def steps(run: Run) -> list[dict[str, Any]]:
    return [row for row in run.rows() if "train/critic_loss" in row]


def test_a_critic_on_a_slot_of_its_own_learns_first_and_then_both(flags: list[str], save: Path) -> None:
    """The KL divergence to the reference is part of the reward, so that the critic needs what the actor says. Two steps
    a rollout; in the first rollout the critic learns alone."""
    reference = ["--ref-load", flags[flags.index("--hf-checkpoint") + 1]]
    more = ["--num-steps-per-rollout", "2", "--num-critic-only-steps", "1", "--num-rollout", "2"]
    with Run(save, *flags, *PPO, *KL, *reference, *more) as run:
        run.finish()
        run.assert_nothing_is_left()
    rows = steps(run)
    assert [(row["rollout_id"], row["step"]) for row in rows] == [(0, 1), (0, 2), (1, 3), (1, 4)]
    alone, together = rows[:2], rows[2:]
    assert not any("train/loss" in row for row in alone)
    assert all(row["rollout/values"] == 0.0 for row in alone), "of both steps: values are those before the rollout"
    assert all(row["rollout/values"] != 0.0 for row in together)
    first = together[0]
    assert first["train/ppo_kl"] == 0.0
    assert first["train/train_rollout_logprob_abs_diff_max"] < 1e-4
    assert rows[-1]["train/grad_norm"] > 0 and rows[-1]["train/critic_grad_norm"] > 0
    assert {"perf/actor_train_time", "perf/critic_train_time"} <= rows[-1].keys()
    checkpoint = save / "iter_0000001"
    assert (checkpoint / "COMPLETE").exists() and (checkpoint / CRITIC / "metadata.json").exists()
    shown = json.loads((save / "run_config.json").read_text())
    assert shown["cluster"]["critic_num_gpus_per_node"]["value"] == 1
    assert shown["critic"]["critic_lr"] == {"value": 0.01, "origin": "command line"}


SAME = ("train/loss", "train/grad_norm", "train/critic_loss", "train/critic_grad_norm", "rollout/values")


@pytest.mark.slow
def test_a_run_with_a_critic_on_the_actors_slot_is_resumed_exactly(flags: list[str], tmp_path: Path) -> None:
    """Two rollouts at once, against one and one more; the critic's checkpoints are in a root of their own."""
    shared = [*flags, *PPO, "--colocate-critic"]
    with Run(
        tmp_path / "whole", *shared, "--num-rollout", "2", "--critic-save", str(tmp_path / "whole-critic")
    ) as whole:
        whole.finish()
        whole.assert_nothing_is_left()
    critic = tmp_path / "critic"
    halves = [*shared, "--critic-save", str(critic)]
    with Run(tmp_path / "halves", *halves, "--num-rollout", "1") as run:
        run.finish()
    more = ["--load", str(run.save), "--critic-load", str(critic), "--num-rollout", "2"]
    with Run(tmp_path / "halves", *halves, *more) as resumed:
        resumed.finish()
    first, second = steps(whole), steps(resumed)
    assert [row["rollout_id"] for row in second] == [0, 1]
    for a, b in zip(first, second, strict=True):
        assert {name: a[name] for name in SAME} == {name: b[name] for name in SAME}
    assert second[1]["rollout/values"] != 0.0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_language_model_learns_to_add(tmp_path: Path) -> None:
    """The demo's model and task, with a critic in place of the groups' baselines, in 24 optimizer steps."""
    assert SMOLLM2.is_dir(), "make models/SmolLM2-135M-Instruct/model.safetensors"
    task, run = tmp_path / "task", tmp_path / "run"
    subprocess.run([sys.executable, "tools/make_arithmetic.py", str(task)], cwd=ROOT, check=True)
    script = ["bash", "scripts/run-smollm2-135M-cpu.sh", "--advantage-estimator", "ppo", "--critic-lr", "1e-4"]
    done = subprocess.run(
        [*script, "--normalize-advantages", "--no-save-optim"],
        cwd=ROOT,
        env={**os.environ, "TASK": str(task), "RUN": str(run)},
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["eval/arithmetic"] for row in rows if "eval/arithmetic" in row]
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.8
    last = [row for row in rows if "rollout/values" in row][-1]
    assert last["rollout/values"] == pytest.approx(last["rollout/returns"], abs=0.25), "what the critic expects came"
