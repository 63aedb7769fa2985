"""train_async.py is train.py with --asynchronous in front: what follows from it, and what it excludes."""

from __future__ import annotations

import pytest

from vime.config import resolve

APART = "--asynchronous --no-colocate --rollout-num-gpus 1"


def config(flags, words):  # type: ignore[no-untyped-def]
    resolution = resolve(flags(*words.split()))
    assert resolution.violations == ()
    return resolution.config


def test_staleness_is_one_training_where_generation_runs_ahead_and_none_elsewhere(flags):
    ahead, in_turn = config(flags, APART), config(flags, "")
    assert (ahead.asynchrony.max_staleness, in_turn.asynchrony.max_staleness) == (1, 0)
    assert ahead.origins["max_staleness"] == "derived: asynchronous"


@pytest.mark.parametrize(
    ("words", "corrected"),
    [
        ("", True),
        ("--max-staleness 0", False),
        ("--use-tis false", False),
        ("--no-use-tis", False),
        ("--use-rollout-logprobs", False),
        ("--rollout-top-p 0.9", False),
        ("--loss-type custom_loss --custom-loss-function-path tests.config.sample_hooks:loss", False),
    ],
)
def test_importance_sampling_is_on_where_samples_may_be_stale_and_it_can_be(flags, words, corrected):
    off_policy = resolve(flags(*APART.split(), *words.split())).config.off_policy
    assert off_policy.use_tis is corrected


def test_a_bound_alone_turns_it_on_too_and_a_given_value_wins(flags):
    assert config(flags, "--max-staleness 1").off_policy.use_tis is True
    assert config(flags, "--max-staleness 0 --use-tis").off_policy.use_tis is True
    assert config(flags, APART).origins["use_tis"] == "derived: max-staleness"
    assert config(flags, APART + " --no-use-tis").origins["use_tis"] == "command line"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--asynchronous",
            "--colocate and train_async.py exclude each other: engines that sleep while the trainer computes cannot "
            "sample at the same time; give them slots of their own by --rollout-num-gpus, or use train.py",
        ),
        (
            APART + " --offload-rollout",
            "--offload-rollout and train_async.py exclude each other: engines that sleep while the trainer computes "
            "cannot sample at the same time; give them slots of their own by --rollout-num-gpus, or use train.py",
        ),
        (
            "--asynchronous --no-colocate --loss-type sft_loss --n-samples-per-prompt 1",
            "--loss-type sft_loss samples nothing that could run ahead of training: use train.py",
        ),
        (
            "--update-weights-interval 2",
            "--update-weights-interval 2 needs train_async.py: train.py samples with the newest weights",
        ),
        (
            APART + " --update-weights-interval 3",
            "--update-weights-interval 3 makes samples 2 trainings stale and --max-staleness 1 allows 1: nothing could "
            "be trained before the next sync",
        ),
        (APART + " --max-staleness -1", "--max-staleness must be at least 0, not -1"),
        (APART + " --update-weights-interval 0", "--update-weights-interval must be at least 1, not 0"),
    ],
)
def test_what_is_refused(flags, words, message):
    assert message in resolve(flags(*words.split())).violations


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--max-staleness 0",
            "--max-staleness 0 with --update-weights-interval 1: no rollout can be sampled while another is trained "
            "on; --max-staleness 1 lets all",
        ),
        (
            "--update-weights-interval 2",
            "--max-staleness 1 with --update-weights-interval 2: only 1 of 2 rollouts can be sampled while another is "
            "trained on; --max-staleness 2 lets all",
        ),
        (
            "--use-rollout-logprobs",
            "--max-staleness 1 without --use-tis, which --use-rollout-logprobs excludes: stale tokens weigh as new "
            "ones",
        ),
    ],
)
def test_what_is_doubted(flags, words, message):
    assert message in resolve(flags(*APART.split(), *words.split())).warnings
    assert not resolve(flags(*APART.split())).warnings
