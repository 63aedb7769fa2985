"""Closed groups become a batch; nothing invalid gets through and nothing is dropped."""

import math
from functools import partial

import numpy as np
import pytest

from vime.errors import UserError
from vime.rollout.conversion import to_rollout_batch
from vime.types import Grade, InvalidSample, Sample, Status


def sample(number: int, reward: float | None = 1.0, **fields) -> Sample:
    base = {
        "group_index": number // 2,
        "index": number,
        "tokens": [5, 6, 7, 8],
        "response_length": 2,
        "rollout_log_probs": [-1.0, -2.0],
        "weight_versions": [3, 3],
        "status": Status.COMPLETED,
        "reward": reward,
        "grade": Grade.error("deadline exceeded") if reward is None else None,
    }
    return Sample(**(base | fields))


def halve(samples: list[Sample]) -> tuple[list[float], list[float]]:
    raw = [s.score() for s in samples]
    return raw, [value / 2 for value in raw]


def test_samples_are_ordered_by_index_and_carry_raw_and_processed_rewards():
    batch = to_rollout_batch(7, [[sample(2, 4.0), sample(3)], [sample(1), sample(0, 3.0)]], halve)
    assert batch.rollout_id == 7
    assert [s.index for s in batch.samples] == [0, 1, 2, 3]
    assert [(s.raw_reward, s.reward) for s in batch.samples] == [(3, 1.5), (1, 0.5), (4, 2), (1, 0.5)]
    assert batch.samples[0].loss_mask == (1, 1)


def test_a_sample_whose_grader_failed_keeps_its_place_but_is_not_trained_on():
    seen = []

    def post_process(samples):
        seen.extend(s.index for s in samples)
        return halve(samples)

    batch = to_rollout_batch(0, [[sample(0), sample(1, None)]], post_process)
    assert seen == [0], "it takes no part in the baseline"
    assert len(batch.samples) == 2 and batch.samples[1].loss_mask == (0, 0)


def test_a_removed_sample_takes_part_in_the_baseline_but_is_not_trained_on():
    batch = to_rollout_batch(0, [[sample(0, remove_sample=True), sample(1)]], halve)
    assert batch.samples[0].reward == 0.5 and batch.samples[0].loss_mask == (0, 0)


def test_an_empty_response_keeps_its_place_with_nothing_to_train():
    empty = sample(0, response_length=0, rollout_log_probs=[], weight_versions=[])
    batch = to_rollout_batch(0, [[empty, sample(1)]], halve)
    assert batch.samples[0].loss_mask == (0,)
    assert batch.samples[0].rollout_log_probs == (0.0,), "micro-batches with and without log-probs have other metrics"


def test_an_empty_response_has_no_log_probs_where_the_generate_function_gives_none():
    empty = sample(0, response_length=0, rollout_log_probs=None, weight_versions=[])
    batch = to_rollout_batch(0, [[empty, sample(1, rollout_log_probs=None)]], halve)
    assert [each.rollout_log_probs for each in batch.samples] == [None, None]


def test_no_reward_at_all_is_an_error_that_says_why():
    with pytest.raises(UserError, match=r"rollout 4: no sample has a reward; the first: sample 0 .*deadline exceeded"):
        to_rollout_batch(3, [[sample(0, None), sample(1, None)]], halve)


def test_the_sample_without_a_reward_is_named_once():
    first = sample(0, None)
    first.grade = Grade.error(f"--custom-rm-path my:rm: raised KeyError, for {first.name}")
    with pytest.raises(UserError) as told:
        to_rollout_batch(0, [[first]], halve)
    assert str(told.value).count("sample 0") == 1 and str(told.value).startswith("rollout 1: ")


@pytest.mark.parametrize("status", [Status.FAILED, Status.ABORTED])
def test_a_sample_that_failed_keeps_its_place_whatever_the_hook_left_in_it(status):
    broken = sample(0, status=status, response_length=7, loss_mask=[1])
    batch = to_rollout_batch(0, [[broken, sample(1)]], halve)
    assert batch.samples[0].loss_mask == (0,) and batch.samples[0].reward == 0


@pytest.mark.parametrize("tokens", [[], [5]])
def test_a_sample_that_failed_before_it_had_a_prompt_keeps_its_place_too(tokens):
    broken = sample(0, status=Status.FAILED, tokens=tokens, response_length=0, rollout_log_probs=None)
    (place, _) = to_rollout_batch(0, [[broken, sample(1)]], halve, needs_log_probs="--use-tis").samples
    assert (place.tokens, place.response_length, place.loss_mask) == ((0, 0), 1, (0,))
    assert (place.rollout_log_probs, place.graded, place.raw_reward) == ((0.0,), False, 0.0)


@pytest.mark.parametrize("needs", [None, "--use-tis"])
@pytest.mark.parametrize(
    "untrained",
    [
        {"status": Status.FAILED},
        {"status": Status.ABORTED, "response_length": 1},
        {"reward": None},
        {"remove_sample": True},
        {"loss_mask": [0, 0]},
    ],
)
def test_a_sample_that_is_not_trained_needs_no_log_probs(untrained, needs):
    groups = [[sample(0, **({"rollout_log_probs": None} | untrained)), sample(1)]]
    first, second = to_rollout_batch(0, groups, halve, needs_log_probs=needs).samples
    assert first.rollout_log_probs == (0.0,) * first.response_length
    assert second.rollout_log_probs == (-1.0, -2.0)


def test_a_sample_without_a_reward_says_so():
    batch = to_rollout_batch(0, [[sample(0, 0.0), sample(1, None)]], halve)
    assert [(each.raw_reward, each.graded) for each in batch.samples] == [(0.0, True), (0.0, False)]


def test_log_probs_that_only_some_samples_have_are_left_out(caplog):
    batch = to_rollout_batch(0, [[sample(0, rollout_log_probs=None), sample(1)]], halve)
    assert [s.rollout_log_probs for s in batch.samples] == [None, None]
    assert "sample 0 (group 0, no rollout) has no rollout_log_probs: those of the whole rollout" in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_mask": [1]}, "loss_mask has 1 entries for 2 response tokens"),
        ({"loss_mask": [1, 2]}, "values other than 0 and 1"),
        ({"rollout_log_probs": [-1.0] * 3}, "rollout_log_probs has 3 entries for 2"),
        ({"response_length": 9}, "response_length is 9"),
        ({"index": None}, "without its index"),
    ],
)
def test_a_broken_sample_is_named(fields, message):
    with pytest.raises(InvalidSample, match=message):
        to_rollout_batch(0, [[sample(0, **fields), sample(1)]], halve)


@pytest.mark.parametrize("reward", ["1", {"acc": 1.0}])
def test_a_reward_that_is_no_number_ends_the_run(reward):
    with pytest.raises(InvalidSample, match="sample 0"):
        to_rollout_batch(0, [[sample(0, reward), sample(1)]], halve)


def test_post_processing_must_return_one_reward_a_sample():
    with pytest.raises(UserError, match="returned 1 raw and 2 processed rewards for 2 samples"):
        to_rollout_batch(0, [[sample(0), sample(1)]], lambda samples: ([1.0], [1.0, 2.0]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_processed_reward_that_is_not_finite_is_named_and_not_trained_on(bad, caplog):
    batch = to_rollout_batch(0, [[sample(0), sample(1)]], lambda samples: ([1.0, 1.0], [0.5, bad]))
    assert [(s.reward, s.loss_mask) for s in batch.samples] == [(0.5, (1, 1)), (0.0, (0, 0))]
    assert batch.metrics == {"rollout/nonfinite_rewards": 1.0}
    assert "sample 1 (group 0, no rollout): its reward is not a finite number" in caplog.text


@pytest.mark.parametrize("reward", [math.nan, math.inf, np.float32("nan"), 10**400, {"a": math.nan, "b": 1.0}])
def test_a_reward_that_is_not_finite_takes_no_part_in_the_baseline(reward, caplog):
    seen = []

    def post_process(samples):
        seen.extend(s.index for s in samples)
        return halve(samples)

    score = partial(Sample.score, reward_key="a")
    batch = to_rollout_batch(0, [[sample(0), sample(1, reward)]], post_process, score=score)
    assert seen == [0]
    assert [s.loss_mask for s in batch.samples] == [(1, 1), (0, 0)]
    assert batch.metrics == {"rollout/nonfinite_rewards": 1.0}
    assert "sample 1 (group 0, no rollout): its reward is not a finite number" in caplog.text


def test_who_needs_log_probs_names_the_sample_without_them():
    groups = [[sample(0), sample(1, rollout_log_probs=None)]]
    assert all(s.rollout_log_probs is None for s in to_rollout_batch(0, groups, halve).samples)
    with pytest.raises(InvalidSample, match=r"sample 1 .*: it has no rollout_log_probs, and --use-tis needs them"):
        to_rollout_batch(0, groups, halve, needs_log_probs="--use-tis")


def test_groups_without_a_signal_can_be_left_out_of_every_mean():
    groups = [[sample(0, 1.0), sample(1, 0.0)], [sample(2, 0.9), sample(3, 0.9)], [sample(4, 1.0), sample(5, None)]]
    kept = to_rollout_batch(0, groups, halve).samples
    assert all(s.counts for s in kept) and kept[2].loss_mask == (1, 1)
    left = to_rollout_batch(0, groups, halve, exclude_zero_signal=True).samples
    assert [s.counts for s in left] == [True, True, False, False, False, False]
    assert [sum(s.loss_mask) for s in left] == [2, 2, 0, 0, 0, 0]


@pytest.mark.parametrize(("reward", "found"), [(np.float32(0.5), 0.5), (True, 1.0), (10**400 // 10**399, 10.0)])
def test_a_reward_is_a_number_of_any_kind(reward, found):
    assert to_rollout_batch(0, [[sample(0, reward)]], halve).samples[0].raw_reward == found


def test_a_key_that_is_not_trained_on_may_be_anything():
    score = partial(Sample.score, reward_key="b")
    batch = to_rollout_batch(0, [[sample(0, {"a": math.nan, "b": 1.0})]], lambda s: ([1.0], [1.0]), score=score)
    assert batch.samples[0].loss_mask == (1, 1)


def test_two_groups_with_one_index_would_share_a_baseline_and_are_refused():
    one, two = [sample(0), sample(1)], [sample(2, group_index=0), sample(3, group_index=0)]
    with pytest.raises(InvalidSample, match="two groups have the group_index 0, that of sample 0 and that of sample 2"):
        to_rollout_batch(7, [one, two], halve)
    with pytest.raises(InvalidSample, match="two samples have the index 1; the data source must give every sample one"):
        to_rollout_batch(7, [one, [sample(2), sample(1, group_index=1)]], halve)
