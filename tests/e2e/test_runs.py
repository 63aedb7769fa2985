"""Whole runs on the real stack: Ray, a vLLM server behind a vllm-router, Megatron-core."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Run
from tests.processes import command_of

pytestmark = pytest.mark.timeout(900)  # whole runs on a busy machine; each wait has a deadline of its own

SAMPLE_KEYS = ("index", "group_index", "prompt", "response", "reward", "status", "weight_versions")
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""They look for their killed cluster for a minute before they end by themselves."""

TRAINER_METRICS = ("train/loss", "train/pg_loss", "train/kl_loss", "train/grad_norm", "rollout/log_probs", "train/lr")


def test_a_killed_run_resumes_exactly_where_its_last_checkpoint_is(flags: list[str], tmp_path: Path) -> None:
    """Six rollouts at once, against a kill -9 after the third and three more: the same prompts, sampled tokens, rewards
    and losses, bit for bit. The reference model takes part, so that its log-probs are covered too. The
    whole run and the one that is killed stand beside each other: neither end touches the other."""
    reference = flags[flags.index("--hf-checkpoint") + 1]
    kl = ["--use-kl-loss", "--kl-loss-coef", "0.01", "--kl-loss-type", "k3", "--ref-load", reference]
    schedule = [*flags, *kl, "--num-rollout", "6", "--save-interval", "3"]

    stops = ["--rollout-sample-hook", "tests.e2e.hooks:stop_at_the_fourth"]  # before it has saved another checkpoint

    with Run(tmp_path / "whole", *schedule) as whole, Run(tmp_path / "killed", *schedule, *stops) as killed:
        saved = killed.save / "latest_checkpointed_iteration.txt"
        killed.wait_for(saved.exists, "the first checkpoint")
        killed.signal(signal.SIGKILL)
        killed.wait()
        killed.assert_nothing_is_left(but=RAY_AGENTS)
        whole.finish()
        whole.assert_nothing_is_left()
    assert saved.read_text().split() == ["2"]

    with Run(tmp_path / "killed", *schedule, "--load", str(killed.save)) as resumed:
        resumed.finish()
    assert "resuming from" in resumed.output()

    for rollout_id in range(6):
        assert pick(resumed.samples(rollout_id)) == pick(whole.samples(rollout_id)), f"samples of rollout {rollout_id}"
    first, second = train_rows(whole), train_rows(resumed)
    assert [row["rollout_id"] for row in second] == list(range(6)), "no row is missing or doubled"
    for a, b in zip(first, second, strict=True):
        assert {key: a[key] for key in TRAINER_METRICS} == {key: b[key] for key in TRAINER_METRICS}
        assert a["rollout/rollout_log_probs"] == pytest.approx(b["rollout/rollout_log_probs"], abs=1e-5)

    check_first_step(first[0])
    assert any(row["train/grad_norm"] > 0 for row in first)
    assert first[-1]["train/kl_loss"] > 0, "the policy has moved away from the reference"


def check_first_step(row: dict[str, Any]) -> None:
    """On-policy with a single step, and a reference that is the policy itself: nothing differs, exactly."""
    assert row["train/ppo_kl"] == 0
    assert row["train/pg_clipfrac"] == 0
    assert row["train/kl_loss"] == 0
    assert row["train/train_rollout_logprob_abs_diff_max"] < 1e-4


@dataclass(frozen=True)
class Ends:
    """Runs that end in different ways, started at the same time: to start is most of what they do."""

    by_ctrl_c: Run
    by_its_engine: Run
    by_its_rewards: Run


@pytest.fixture(scope="module")
def ends(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ends]:
    folder = tmp_path_factory.mktemp("ends")
    endless = [*flags, "--num-rollout", "100000"]
    broken = list(endless)
    broken[broken.index("--custom-rm-path") + 1] = "tests.e2e.hooks:broken"
    with (
        Run(folder / "ctrl_c", *endless) as by_ctrl_c,
        Run(folder / "engine", *endless) as by_its_engine,
        Run(folder / "rewards", *broken) as by_its_rewards,
    ):
        yield Ends(by_ctrl_c, by_its_engine, by_its_rewards)


def test_ctrl_c_ends_everything(ends: Ends) -> None:
    run = ends.by_ctrl_c
    run.wait_for(lambda: len(run.rows()) >= 2, "two rollouts")
    run.signal(signal.SIGINT)
    assert run.wait() == 130
    run.assert_nothing_is_left()
    assert run.output().splitlines()[-3:] == [
        "interrupted: stopping every process",
        "interrupted: every process was stopped",
        "nothing was saved: no --save-interval",
    ]


def test_a_killed_engine_ends_the_run_with_the_cause_last(ends: Ends) -> None:
    run = ends.by_its_engine
    run.wait_for(lambda: len(run.rows()) >= 1, "a rollout")
    (engine,) = [each for each in run.named("vime.serving.server") if "guard.py" not in command_of(each)]
    engine.kill()
    assert run.wait() == 1
    run.assert_nothing_is_left()
    end = run.output()[-1500:]
    assert "engine 0" in end and "Traceback" not in end, end


def test_rewards_that_all_fail_end_the_run_and_say_why(ends: Ends) -> None:
    run = ends.by_its_rewards
    assert run.wait() == 1
    run.assert_nothing_is_left()
    last = run.output().splitlines()[-1]
    assert "rollout 1: no sample has a reward" in last and "the reward service is down" in last


@pytest.mark.slow
def test_two_ranks_and_two_engines_on_slots_of_their_own(flags: list[str], save: Path) -> None:
    """Separate training and inference, several optimizer steps a rollout, balanced over two data-parallel ranks."""
    words = [word for word in flags if word != "--colocate"]
    words[words.index("--actor-num-gpus-per-node") + 1] = "2"
    more = ["--rollout-num-gpus", "2", "--num-steps-per-rollout", "2", "--balance-data", "--calculate-per-token-loss"]
    with Run(save, *words, *more, "--num-rollout", "2") as run:
        run.finish()
        run.assert_nothing_is_left()
    rows = train_rows(run)
    assert [(row["rollout_id"], row["step"]) for row in rows] == [(0, 1), (0, 2), (1, 3), (1, 4)]
    assert all(row["train/train_rollout_logprob_abs_diff_max"] < 1e-4 for row in rows[::2]), "before the first update"
    assert [len(run.samples(rollout_id)) for rollout_id in range(2)] == [16, 16]
    assert {log.name for log in (save / "logs").iterdir()} == {"engine_0.log", "engine_1.log", "router.log"}


def train_rows(run: Run) -> list[dict[str, Any]]:
    return [row for row in run.rows() if "train/loss" in row]


def pick(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: sample[key] for key in SAMPLE_KEYS} for sample in samples]


@pytest.mark.slow
def test_float16_on_both_sides(flags: list[str], save: Path) -> None:
    """No step is lost to the scale of the loss, and engine and trainer agree to a few thousandths of a nat."""
    words = [word if word != "--fp32" else "--fp16" for word in flags]
    with Run(save, *words, "--num-rollout", "4") as run:
        run.finish()
    rows = train_rows(run)
    differences = [row["train/train_rollout_logprob_abs_diff"] for row in rows]
    assert [row["train/skipped_steps"] for row in rows] == [0.0] * 4, differences
    assert max(differences) <= 0.008
