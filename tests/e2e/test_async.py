"""Whole runs of train_async.py on the real stack."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.harness import Run
from tests.e2e.test_runs import TRAINER_METRICS, pick, train_rows

pytestmark = pytest.mark.timeout(900)


def apart(flags: list[str]) -> list[str]:
    """The same with slots of their own for the engines."""
    return [*(word for word in flags if word != "--colocate"), "--rollout-num-gpus", "1"]


def test_without_staleness_train_async_makes_the_numbers_of_train(flags: list[str], tmp_path: Path) -> None:
    """Bit for bit in float32: prompts, tokens, rewards, versions and losses. Both run at the same time."""
    words = [*apart(flags), "--num-rollout", "3"]
    with (
        Run(tmp_path / "sync", *words) as sync,
        Run(tmp_path / "async", *words, "--max-staleness", "0", script="train_async.py") as ahead,
    ):
        sync.finish()
        ahead.finish()
        ahead.assert_nothing_is_left()
    for rollout_id in range(3):
        assert pick(ahead.samples(rollout_id)) == pick(sync.samples(rollout_id)), f"samples of rollout {rollout_id}"
    for a, b in zip(train_rows(sync), train_rows(ahead), strict=True):
        assert {key: a[key] for key in TRAINER_METRICS if key in a} == {
            key: b[key] for key in TRAINER_METRICS if key in b
        }
        assert b["rollout/staleness/max"] == 0


@pytest.mark.slow
def test_a_killed_fully_asynchronous_run_accounts_for_every_sample(flags: list[str], tmp_path: Path) -> None:
    """The example with a tiny model, evaluations and a kill -9: nothing is trained twice, nothing too stale."""
    example = ["--config", "examples/fully_async/cpu.yaml", *apart(flags), "--rollout-max-response-len", "48"]
    prompts = flags[flags.index("--prompt-data") + 1]
    words = [*example, "--eval-interval", "2", "--eval-prompt-data", "sums", prompts, "--save-interval", "2"]
    words += ["--num-rollout", "6"]
    save = tmp_path / "run"
    with Run(save, *words, script="train_async.py") as killed:
        saved = save / "latest_checkpointed_iteration.txt"
        killed.wait_for(saved.exists, "the first checkpoint")
        killed.signal(signal.SIGKILL)
        killed.wait()
    last = int(saved.read_text())
    state = json.loads((save / f"iter_{last:07d}" / "vime_state.json").read_text())
    ahead = [sample["index"] for group in state["rollouts"]["groups"] for sample in group]
    assert state["weight_history"]["trainings"][-1] == last + 1

    with Run(save, *words, "--load", str(save), script="train_async.py") as resumed:
        resumed.finish()
        resumed.assert_nothing_is_left()
    rows = train_rows(resumed)
    assert [row["rollout_id"] for row in rows] == list(range(6))
    assert max(row["rollout/staleness/max"] for row in rows) <= 2
    trained = [sample["index"] for rollout_id in range(6) for sample in resumed.samples(rollout_id)]
    assert len(trained) == len(set(trained)) == 6 * 16
    assert set(ahead) <= {*trained, *left_over(save)}, "what was under way when it was killed"
    drawn = json.loads((save / "iter_0000005" / "vime_state.json").read_text())["source"]["next_index"]
    assert {*trained, *left_over(save)} == set(range(drawn))
    evaluated = [row for row in resumed.rows() if "eval/sums" in row]
    assert [row["rollout_id"] for row in evaluated] == [0, 2, 4, 6]
    assert all(row["eval/weight_version/min"] == row["eval/weight_version/max"] for row in evaluated)


def left_over(save: Path) -> list[int]:
    """Samples that the last checkpoint of a run of six rollouts has in flight or in the buffer."""
    state = json.loads((save / "iter_0000005" / "vime_state.json").read_text())
    groups = state["rollouts"]["groups"] + state["source"]["buffer"]
    return [sample["index"] for group in groups for sample in group]


@pytest.mark.slow
def test_actor_and_critic_train_while_the_next_rollout_is_sampled(flags: list[str], save: Path) -> None:
    """Weights go out after every second rollout, so that samples are one and two trainings stale."""
    ppo = ["--advantage-estimator", "ppo", "--critic-lr", "1e-3", "--update-weights-interval", "2"]
    with Run(save, *apart(flags), *ppo, "--max-staleness", "2", "--num-rollout", "4", script="train_async.py") as run:
        run.finish()
        run.assert_nothing_is_left()
    rows = train_rows(run)
    assert [row["rollout_id"] for row in rows] == list(range(4))
    assert all(row["train/critic_loss"] > 0 for row in rows)
    assert [row["rollout/weight_version/max"] for row in rows] == sorted(
        row["rollout/weight_version/max"] for row in rows
    )
    assert max(row["rollout/staleness/max"] for row in rows) == 2
