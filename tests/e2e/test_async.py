"""Whole runs of train_async.py on the real stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import Run
from tests.e2e.test_runs import TRAINER_METRICS, pick, train_rows

pytestmark = pytest.mark.timeout(900)


def apart(flags: list[str]) -> list[str]:
    """The same with slots of their own for the engines."""
    return [*(word for word in flags if word != "--colocate"), "--rollout-num-gpus", "1"]


def test_without_staleness_train_async_makes_the_numbers_of_train(flags: list[str], tmp_path: Path) -> None:
    """Bit for bit in float32: prompts, tokens, rewards, versions and losses."""
    words = [*apart(flags), "--num-rollout", "3"]
    with Run(tmp_path / "sync", *words) as sync:
        sync.finish()
    with Run(tmp_path / "async", *words, "--max-staleness", "0", script="train_async.py") as ahead:
        ahead.finish()
        ahead.assert_nothing_is_left()
    for rollout_id in range(3):
        assert pick(ahead.samples(rollout_id)) == pick(sync.samples(rollout_id)), f"samples of rollout {rollout_id}"
    for a, b in zip(train_rows(sync), train_rows(ahead), strict=True):
        assert {key: a[key] for key in TRAINER_METRICS if key in a} == {
            key: b[key] for key in TRAINER_METRICS if key in b
        }
        assert b["rollout/staleness/max"] == 0
