"""Metric names, and the metrics of a rollout."""

import math

import pytest

from vime.observe.metrics import METRICS, describe, split_finite
from vime.observe.rollout_metrics import pass_rates, repeats_itself, rollout_metrics
from vime.types import Grade, GradeStatus, Sample, Status

PROMISED = [
    "rollout/response_len/mean",
    "rollout/response_len/median",
    "rollout/response_len/max",
    "rollout/response_len/min",
    "rollout/truncated_ratio",
    "rollout/zero_std/count_1.0",
    "rollout/repetition_frac",
    "rollout/raw_reward",
    "rollout/log_probs",
    "rollout/advantages",
    "perf/rollout_time",
    "perf/tokens_per_gpu_per_sec",
    "perf/longest_sample_tokens_per_sec",
    "perf/update_weights_time",
    "perf/actor_train_tflops",
    "train/loss",
    "train/pg_loss",
    "train/entropy_loss",
    "train/pg_clipfrac",
    "train/ppo_kl",
    "train/kl_loss",
    "train/grad_norm",
    "train/lr",
    "train/train_rollout_logprob_abs_diff",
    "train/tis",
    "train/tis_clipfrac",
    "train/ois",
    "eval/aime",
    "eval/aime-truncated_ratio",
    "eval/aime-ci95",
    "eval/aime-pass@4",
    "eval/aime-pass@4-ci95",
    "eval/weight_version/max",
]


def sample(group, *, reward=None, length=4, status=Status.COMPLETED, versions=(), response="x", grade=None):
    return Sample(
        group_index=group,
        tokens=[0] * (length + 3),
        response_length=length,
        response=response,
        reward=reward,
        grade=grade,
        status=status,
        weight_versions=list(versions),
    )


def score(sample):
    return sample.score()


@pytest.mark.parametrize("name", PROMISED)
def test_promised_names_are_registered(name):
    assert describe(name) is not None


def test_every_metric_says_what_it_is():
    assert all(metric.description.endswith(".") for metric in METRICS)
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_a_family_matches_its_members_only():
    assert describe("rollout/zero_std/count_0.5").name == "rollout/zero_std/count_{reward}"
    assert describe("eval/my-set-errors").name == "eval/{name}-errors"
    assert describe("eval/my-set").name == "eval/{name}"
    assert describe("mine/anything") is None


def test_metrics_that_are_not_finite_are_named_and_left_out():
    metrics = {"train/loss": math.nan, "train/lr": 1, "train/grad_norm": math.inf}
    assert split_finite(metrics) == ({"train/lr": 1.0}, ["train/grad_norm", "train/loss"])


def test_metrics_of_a_rollout():
    groups = [
        [sample(0, reward=1, length=2), sample(0, reward=1, length=4)],
        [sample(1, reward=0, length=6, status=Status.TRUNCATED), sample(1, reward=1, length=8)],
    ]
    assert rollout_metrics(groups, 2.0, score=score, engine_slots=2) == {
        "rollout/response_len/mean": 5.0,
        "rollout/response_len/median": 5.0,
        "rollout/response_len/max": 8.0,
        "rollout/response_len/min": 2.0,
        "rollout/truncated_ratio": 0.25,
        "rollout/aborted": 0.0,
        "rollout/failed": 0.0,
        "rollout/repetition_frac": 0.0,
        "rollout/reward_errors": 0.0,
        "rollout/invalid_answers": 0.0,
        "rollout/raw_reward": 0.75,
        "rollout/zero_std/count_1.0": 1.0,
        "rollout/zero_std/ratio": 0.5,
        "perf/rollout_time": 2.0,
        "perf/tokens_per_gpu_per_sec": 5.0,  # 20 tokens / 2 s / 2 slots
        "perf/longest_sample_tokens_per_sec": 4.0,
    }


def test_a_grader_that_failed_is_counted_and_is_no_zero():
    groups = [[sample(0, reward=1), sample(0, grade=Grade.error("deadline"))]]
    metrics = rollout_metrics(groups, 1.0, score=score)
    assert metrics["rollout/reward_errors"] == 1
    assert metrics["rollout/raw_reward"] == 1.0


def test_an_answer_that_is_not_there_counts_as_invalid_with_its_score():
    invalid = Grade(score=0.0, status=GradeStatus.INVALID, detail="no box")
    metrics = rollout_metrics([[sample(0, reward=1), sample(0, reward=0.0, grade=invalid)]], 1.0, score=score)
    assert metrics["rollout/invalid_answers"] == 1
    assert metrics["rollout/raw_reward"] == 0.5


def test_without_any_reward_there_is_no_mean_reward():
    metrics = rollout_metrics([[sample(0, status=Status.ABORTED), sample(0, status=Status.FAILED)]], 1.0, score=score)
    assert "rollout/raw_reward" not in metrics
    assert metrics["rollout/aborted"] == metrics["rollout/failed"] == 1


def test_an_empty_rollout_has_only_a_time():
    assert rollout_metrics([], 3.0, score=score) == {"perf/rollout_time": 3.0}


def test_staleness_is_the_lag_of_each_token():
    groups = [[sample(0, reward=1, versions=[2, 2, 3, 3]), sample(0, reward=0, versions=[3, 3, 3, 3])]]
    metrics = rollout_metrics(groups, 1.0, score=score, staleness_of=lambda version: 4 - version)
    assert metrics["rollout/weight_version/min"] == 2
    assert metrics["rollout/weight_version/max"] == 3
    assert metrics["rollout/staleness/mean"] == 1.25  # (2·2 + 6·1) / 8
    assert metrics["rollout/staleness/max"] == 2
    assert metrics["rollout/mixed_version_ratio"] == 0.5


def test_all_metrics_of_a_rollout_are_registered():
    metrics = rollout_metrics([[sample(0, reward=1, versions=[1] * 4)]], 1.0, score=score, staleness_of=lambda v: 0)
    assert [name for name in metrics if describe(name) is None] == []
    assert all(map(math.isfinite, metrics.values()))


@pytest.mark.parametrize(
    ("text", "repeats"),
    [
        ("so the answer is 4. " * 200, True),
        ("a" * 300, True),
        ("a" * 100, False),  # too short to say
        (" ".join(str(number**3) for number in range(400)), False),
        ("", False),
    ],
)
def test_repetition_is_told_by_how_well_the_end_compresses(text, repeats):
    assert repeats_itself(text) is repeats


def test_pass_rates_use_the_groups_that_are_large_enough():
    groups = [[sample(0, reward=r) for r in (1, 0, 0, 0)], [sample(1, reward=r) for r in (1, 0.5)]]
    assert pass_rates(groups, score) == {
        "rollout/passrate/pass@1": 0.375,
        "rollout/passrate/pass@2": 0.75,  # (1/2 + 1) / 2
        "rollout/passrate/pass@4": 1.0,  # the first group alone
    }


def test_children_of_one_sample_are_one_answer_in_pass_rates():
    """Two answers: one of two children, of which one is right, and one that is wrong."""
    children = [sample(0, reward=reward) for reward in (1, 0)]
    for number, child in enumerate(children):
        child.adopt(0, number)
    assert pass_rates([[*children, sample(0, reward=0)]], score) == {
        "rollout/passrate/pass@1": 0.0,  # half right is not right
        "rollout/passrate/pass@2": 0.0,
    }


def test_children_of_one_sample_are_one_answer_in_the_mean_reward():
    children = [sample(0, reward=reward) for reward in (1, 1, 1)]
    for number, child in enumerate(children):
        child.adopt(0, number)
    metrics = rollout_metrics([[*children, sample(0, reward=0)]], 1.0, score=score)
    assert metrics["rollout/raw_reward"] == 0.5


def test_pass_rates_of_nothing():
    assert pass_rates([], score) == {}
