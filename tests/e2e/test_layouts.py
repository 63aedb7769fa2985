"""Whole runs in which several ranks share the model: the numbers stay those of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Run
from tests.tiny import make_model

pytestmark = pytest.mark.timeout(1200)  # whole runs on a busy machine; each wait has a deadline of its own

LAYOUTS = {
    "tensor, sequence": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pipeline": "--pipeline-model-parallel-size 2",
    "context": "--context-parallel-size 2",
    "data": "",
    "data, distributed optimizer, balanced": "--use-distributed-optimizer --balance-data",
}
SAME = ("train/loss", "train/pg_loss", "train/kl_loss", "train/entropy_loss", "train/grad_norm", "rollout/log_probs")


def run_of(flags: list[str], save: Path, ranks: int, *more: str, rollouts: int = 2) -> Run:
    """Trainer ranks and one engine on slots of their own."""
    words = [word for word in flags if word != "--colocate"]
    words[words.index("--actor-num-gpus-per-node") + 1] = str(ranks)
    reference = words[words.index("--hf-checkpoint") + 1]
    kl = ["--use-kl-loss", "--kl-loss-coef", "0.01", "--kl-loss-type", "k3", "--ref-load", reference]
    return Run(save, *words, *kl, "--rollout-num-gpus", "1", "--num-rollout", str(rollouts), *more)


def train_rows(run: Run) -> list[dict[str, Any]]:
    return [row for row in run.rows() if "train/loss" in row]


def responses(run: Run, rollout_id: int) -> list[str]:
    return [sample["response"] for sample in run.samples(rollout_id)]


def assert_same(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for row, other in zip(rows, expected, strict=True):
        assert {name: row[name] for name in SAME} == pytest.approx(
            {name: other[name] for name in SAME}, rel=1e-3, abs=1e-5
        )


@pytest.fixture(scope="module")
def alone(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with run_of(flags, tmp_path_factory.mktemp("alone") / "run", 1) as run:
        run.finish()
        yield run


def test_four_ranks_share_the_model_and_the_engine_gets_all_of_it(flags: list[str], save: Path) -> None:
    """Every rollout compares what the engine said of its tokens with what the trainer says: stages and shards of the
    weights arrive whole, before the first update and behind it."""
    words = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--pipeline-model-parallel-size", "2"]
    with run_of(flags, save, 4, *words) as run:
        run.finish()
        run.assert_nothing_is_left()
    first, second = train_rows(run)
    for row in (first, second):
        assert row["train/train_rollout_logprob_abs_diff_max"] < 1e-4
        assert row["train/ppo_kl"] == 0, "on-policy: the policy that sampled is the one that learns"
    assert first["train/kl_loss"] == 0
    assert second["train/kl_loss"] > 0, "the weights have moved away from the reference"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_run_on_two_ranks_has_the_numbers_of_one(flags: list[str], save: Path, alone: Run, layout: str) -> None:
    with run_of(flags, save, 2, *layout.split()) as run:
        run.finish()
        run.assert_nothing_is_left()
    assert_same(train_rows(run), train_rows(alone))
    assert responses(run, 0) == responses(alone, 0)


@pytest.mark.slow
def test_an_engine_of_two_processes_takes_turns_with_a_trainer_of_two(flags: list[str], save: Path) -> None:
    words = [*flags, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--rollout-num-gpus-per-engine", "2"]
    words[words.index("--actor-num-gpus-per-node") + 1] = "2"
    with Run(save, *words, "--num-rollout", "2") as run:
        run.finish()
        run.assert_nothing_is_left()
    assert {log.name for log in (save / "logs").iterdir()} == {"engine_0.log", "router.log"}
    for row in train_rows(run):
        assert row["train/train_rollout_logprob_abs_diff_max"] < 1e-4


@pytest.mark.slow
def test_a_run_goes_on_under_another_layout(flags: list[str], save: Path, alone: Run) -> None:
    """Weights, optimizer, schedule and data come from two pipeline stages to two shards."""
    with run_of(flags, save, 2, "--pipeline-model-parallel-size", "2", rollouts=1) as run:
        run.finish()
    words = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--load", str(save)]
    with run_of(flags, save, 2, *words, rollouts=2) as resumed:
        resumed.finish()
        resumed.assert_nothing_is_left()
    assert "resuming from" in resumed.output()
    assert_same(train_rows(resumed), train_rows(alone))
    assert responses(resumed, 1) == responses(alone, 1)


@pytest.mark.slow
def test_experts_of_two_ranks_reach_the_engine(flags: list[str], save: Path, tmp_path: Path) -> None:
    words = list(flags)
    words[words.index("--hf-checkpoint") + 1] = str(make_model(tmp_path / "model", "qwen3_moe"))
    with run_of(words, save, 2, "--expert-model-parallel-size", "2") as run:
        run.finish()
        run.assert_nothing_is_left()
    for row in train_rows(run):
        assert row["train/train_rollout_logprob_abs_diff_max"] < 1e-4
