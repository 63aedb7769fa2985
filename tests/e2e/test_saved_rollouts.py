"""Rollouts are saved by one run and trained on by another, which has no engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import Run

pytestmark = pytest.mark.timeout(900)

SAME = ("train/loss", "train/grad_norm", "rollout/log_probs", "rollout/raw_reward", "rollout/response_len/mean")


def test_what_was_saved_trains_again_to_the_same_numbers_and_no_engine_is_started(
    flags: list[str], tmp_path: Path
) -> None:
    """The trainer is bit for bit the same from its first weights on; so are losses and gradients of every rollout."""
    schedule = [*flags, "--num-rollout", "3"]
    template = str(tmp_path / "dump" / "rollout_{rollout_id}.json")
    with Run(tmp_path / "sampled", *schedule, "--save-debug-rollout-data", template) as sampled:
        sampled.finish()
    with Run(tmp_path / "again", *schedule, "--load-debug-rollout-data", template, keeps=False) as again:
        again.wait_for(lambda: (again.save / "metrics.jsonl").exists(), "its first rollout")
        assert not again.named("openai.api_server") and not again.named("vllm-router")
        again.finish()
        again.assert_nothing_is_left()
    first, second = ([row for row in run.rows() if "train/loss" in row] for run in (sampled, again))
    assert [row["rollout_id"] for row in second] == [0, 1, 2]
    assert [{key: row[key] for key in SAME} for row in first] == [{key: row[key] for key in SAME} for row in second]
    assert any(row["train/grad_norm"] > 0 for row in first)
