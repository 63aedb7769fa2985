"""An engine on a GPU that is killed: it comes back with the weights that the trainer has by then."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.test_faults import server_of, train_rows
from tests.gpu.demo import ANSWERS, PROMPTS, demo

WRONG = 0.3
"""Nats a token. Rounding gives 0.05 at most; after two steps the weights of the start are more than one off."""


@pytest.mark.two_gpus
def test_a_killed_engine_comes_back_with_the_present_weights(tmp_path: Path) -> None:
    more = ["--use-fault-tolerance", "--num-rollout", "100000"]
    with demo(tmp_path / "run", "separate", *more, hook="keep_tokens_and_rest") as run:
        run.wait_for(lambda: len(run.rows()) >= 3, "three steps")
        server_of(run, "engine_0.log").kill()
        run.wait_for(lambda: "engine 0 was restarted" in run.output(), "another engine")
        rows = len(run.rows())
        run.wait_for(lambda: len(run.rows()) >= rows + 2, "rollouts with it")
        run.signal(signal.SIGINT)
        assert run.wait() == 130
        run.assert_nothing_is_left()
    assert sum(row["rollout/engine_restarts"] for row in train_rows(run)) == 1
    for row in train_rows(run):
        samples = run.samples(row["rollout_id"])
        assert len({(each["group_index"], each["index"]) for each in samples}) == len(samples) == PROMPTS * ANSWERS
        assert {version for each in samples for version in each["weight_versions"]} == {row["rollout_id"] + 1}
        assert row["train/train_rollout_logprob_abs_diff"] < WRONG
