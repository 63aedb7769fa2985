"""An engine on a GPU that is killed: it comes back with the weights that the trainer has by then."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from bench.work import MODEL
from tests.e2e.harness import ROOT, Run
from tests.e2e.test_faults import server_of, train_rows
from tests.gpu.demo import PROMPTS, demo, difference, sampled

ANSWERS = 16
ROUNDING = 0.1
"""Nats a token between engine and trainer, on average; seen are 0.05 before training, and less behind it."""


def answers_of_moved_weights(run: Run) -> bool:
    """Whether some were sampled after three steps with a gradient; the first groups may have no right answer at all."""
    rows = train_rows(run)
    return sum(row["train/grad_norm"] > 0 for row in rows) >= 3 and bool(sampled(run, rows[-1]["rollout_id"] + 1))


@pytest.mark.two_gpus
def test_a_killed_engine_comes_back_with_the_present_weights(tmp_path: Path) -> None:
    flags = ["--use-fault-tolerance", "--num-rollout", "100000", "--lr", "1e-4"]
    with demo(tmp_path / "run", "separate", *flags, answers=ANSWERS, hook="keep_tokens_and_rest") as run:
        run.wait_for(lambda: answers_of_moved_weights(run), "three steps, and answers after them")
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
        assert row["train/train_rollout_logprob_abs_diff"] < ROUNDING
    last = sampled(run, train_rows(run)[-1]["rollout_id"])
    assert difference(last, ROOT / MODEL) > 2 * ROUNDING, "the weights of the start would have been noticed"
