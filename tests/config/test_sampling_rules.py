"""Flags of dynamic, partial and deterministic rollouts, and what they exclude."""

from __future__ import annotations

import pytest

from vime.config import resolve

LOOP = "examples.plugins.rollout:one_turn"
FILTER = "vime.rollout.filters.check_reward_nonzero_std"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--over-sampling-batch-size 7",
            "--over-sampling-batch-size 7 must be at least --rollout-batch-size 8: a rollout takes its groups from "
            "those that are drawn",
        ),
        (
            "--partial-rollout --deterministic-rollout",
            "--partial-rollout and --deterministic-rollout exclude each other: what is interrupted depends on what was "
            "finished first",
        ),
        (
            "--mask-offpolicy-in-partial-rollout",
            "--mask-offpolicy-in-partial-rollout needs --partial-rollout: nothing is continued without it",
        ),
        (
            f"--rollout-function-path {LOOP} --partial-rollout --dynamic-sampling-filter-path {FILTER}",
            "--partial-rollout, --dynamic-sampling-filter-path: without effect beside --rollout-function-path, which "
            "takes the place of the sampling loop; leave one of them out",
        ),
        (
            "--data-source-path examples.plugins.data_source:Additions --buffer-filter-path "
            "examples.plugins.filters:longest_first",
            "--buffer-filter-path has no effect beside --data-source-path, whose class keeps what is given back to it: "
            "leave one of them out",
        ),
        (
            "--max-sample-requeues 3",
            "--max-sample-requeues needs --use-fault-tolerance: a dead engine ends the run without it",
        ),
        ("--max-refill-rounds -1", "--max-refill-rounds must be at least 0, not -1"),
    ],
)
def test_what_contradicts_itself_is_refused(flags, words, message):
    assert resolve(flags(*words.split())).violations == (message,)


def test_as_many_prompts_are_drawn_as_a_rollout_needs_unless_more_are_asked_for(flags):
    assert resolve(flags()).config.sampling.over_sampling_batch_size == 8
    assert resolve(flags("--over-sampling-batch-size", "20")).config.sampling.over_sampling_batch_size == 20
