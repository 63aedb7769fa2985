"""Group-relative rewards: by group id, in float64, exactly 0 without a signal."""

import math
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.algorithms.rewards import group_normalize, has_signal, overlong_penalty, zero_std_counts

REWARDS = st.floats(-100, 100)


def test_one_right_of_four_with_std():
    # mean .25, std .5 (n - 1), divided by .5 + 1e-6
    assert group_normalize([1, 0, 0, 0], [7] * 4) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_one_right_of_four_without_std():
    assert group_normalize([1, 0, 0, 0], [7] * 4, std=False) == [0.75, -0.25, -0.25, -0.25]


def test_half_right():
    # std = sqrt(4 * .25 / 3) = .57735; .5 / .577351
    assert group_normalize([1, 1, 0, 0], [0] * 4) == pytest.approx([0.86602] * 2 + [-0.86602] * 2, abs=1e-5)


@pytest.mark.parametrize("rewards", [[5, 5, 5], [0.9] * 12, [0.6] * 6, [0.1] * 7, [1e9 / 3] * 5, [-0.7]])
@pytest.mark.parametrize("std", [True, False])
def test_equal_rewards_give_exactly_zero(rewards, std):
    assert group_normalize(rewards, [0] * len(rewards), std=std) == [0.0] * len(rewards)


def test_rounding_residue_of_an_equal_group_is_not_a_signal():
    # 0.1 + 0.2 is 0.30000000000000004; so is what float32 leaves of 0.9
    assert group_normalize([0.3, 0.1 + 0.2], [0, 0]) == [0.0, 0.0]
    assert group_normalize([0.9, float(np.float32(0.9))], [0, 0]) == [0.0, 0.0]


def test_groups_of_different_sizes_do_not_mix():
    rewards = [1, 0, 1, 0, 5, 5, 5, 1, 1, 0, 0]
    groups = [0] * 4 + [1] * 3 + [2] * 4
    a = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert group_normalize(rewards, groups) == pytest.approx([a, -a, a, -a, 0, 0, 0, a, a, -a, -a])


def test_a_group_is_what_the_id_says_not_the_position():
    assert group_normalize([1, 5, 0, 5], ["a", "b", "a", "b"], std=False) == [0.5, 0.0, -0.5, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None, "1"])
def test_what_is_not_a_finite_number_is_refused_by_its_position(bad):
    with pytest.raises(ValueError, match="position 2"):
        group_normalize([1, 0, bad, 1], [0] * 4)


def test_lengths_must_match():
    with pytest.raises(ValueError, match="2 rewards do not match 3 group ids"):
        group_normalize([1, 0], [0, 0, 0])


def test_nothing_gives_nothing():
    assert group_normalize([], []) == []


@given(st.lists(st.tuples(REWARDS, st.integers(0, 4)), min_size=1, max_size=40), st.booleans())
def test_agrees_with_numpy(pairs, std):
    rewards, groups = np.array([r for r, _ in pairs]), np.array([g for _, g in pairs])
    expected = np.zeros(len(rewards))
    for group in set(groups):
        r = rewards[groups == group]
        deviation = r.std(ddof=1) if len(r) > 1 else 0.0
        if deviation > 1e-6:
            expected[groups == group] = (r - r.mean()) / (deviation + 1e-6 if std else 1.0)
    np.testing.assert_allclose(
        group_normalize(rewards.tolist(), groups.tolist(), std=std), expected, rtol=1e-6, atol=1e-6
    )


@given(st.lists(st.tuples(REWARDS, st.integers(0, 4)), max_size=30), st.randoms())
def test_the_order_of_the_samples_does_not_matter(pairs, random):
    values = group_normalize([r for r, _ in pairs], [g for _, g in pairs])
    order = list(range(len(pairs)))
    random.shuffle(order)
    shuffled = group_normalize([pairs[i][0] for i in order], [pairs[i][1] for i in order])
    assert shuffled == pytest.approx([values[i] for i in order], abs=1e-6)


def test_has_signal():
    assert has_signal([1, 0])
    assert not has_signal([0.9] * 12)
    assert not has_signal([1])


def test_zero_std_counts_groups_by_the_reward_that_all_got():
    rewards = [0, 0, 1, 1, 0, 0, 1, 0, 0.349, 0.349, -0.01]
    groups = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert zero_std_counts(rewards, groups) == {"0.0": 3, "1.0": 1, "0.3": 1}


@pytest.mark.parametrize(("length", "penalty"), [(1, 0), (60, 0), (70, -0.25), (80, -0.5), (100, -1), (300, -1)])
def test_long_answers_lose_evenly_within_the_buffer(length, penalty):
    # the longest answer has 100 tokens, the buffer 40: free up to 60
    assert overlong_penalty(length, max_length=100, buffer=40) == pytest.approx(penalty)
    assert overlong_penalty(length, max_length=100, buffer=40, factor=0.5) == pytest.approx(penalty / 2)


@given(st.integers(1, 200), st.integers(1, 100), st.floats(0, 3))
def test_the_overlong_penalty_agrees_with_the_paper(length, buffer, factor):
    # equation 13, in its three cases
    expected = 0 if length <= 100 - buffer else (100 - buffer - length) / buffer if length <= 100 else -1
    assert overlong_penalty(length, max_length=100, buffer=buffer, factor=factor) == pytest.approx(factor * expected)


@pytest.mark.parametrize("buffer", [0, 101])
def test_the_buffer_lies_within_the_longest_answer(buffer):
    with pytest.raises(ValueError, match="from 1 to the 100 tokens"):
        overlong_penalty(1, max_length=100, buffer=buffer)


def test_rewards_and_estimators_load_without_torch():
    code = "import sys, vime.algorithms.rewards, vime.algorithms.advantages; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


FAN_OUT = [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
"""Four drawn samples: three children that got 1, 1 and 0, one alone with 0, two with 0 and 1, one with 0."""
PARENTS = [0, 0, 0, 1, 2, 2, 3]


def test_siblings_that_share_a_reward_are_one_entry():
    """As [1, 0, 0, 0] without children, whose deviation is 0.5."""
    found = group_normalize([1, 1, 1, 0, 0, 0, 0], [0] * 7, parents=[0, 0, 0, 1, 2, 2, 3])
    assert found == pytest.approx([1.5, 1.5, 1.5, -0.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_siblings_that_differ_weigh_as_much_together():
    """Drawn samples have 2/3, 0, 1/2 and 0, so the mean is 7/24; the deviation is sqrt((2/3 (17/24)² + 1/3 (7/24)² +
    (7/24)² + 1/2 (7/24)² + 1/2 (17/24)² + (7/24)²) / 3) = 0.5248."""
    without = group_normalize(FAN_OUT, [0] * 7, std=False, parents=PARENTS)
    assert without == pytest.approx([17 / 24, 17 / 24, *[-7 / 24] * 3, 17 / 24, -7 / 24])
    found = group_normalize(FAN_OUT, [0] * 7, parents=PARENTS)
    assert found == pytest.approx([1.34960, 1.34960, *[-0.55572] * 3, 1.34960, -0.55572], abs=1e-5)


def test_siblings_are_told_apart_even_where_drawn_samples_are_not():
    """Drawn samples that are equal on average divide by no deviation of nothing: what siblings differ is in it."""
    assert group_normalize([1, 0, 0.5], [0] * 3, parents=[0, 0, 1]) == pytest.approx([1.0, -1.0, 0.0], abs=1e-5)
    assert group_normalize([1, 0], [0, 0], parents=[5, 5]) == pytest.approx([1.0, -1.0], abs=1e-5)
    assert group_normalize([0.3] * 3, [0] * 3, parents=[0, 0, 1]) == [0.0] * 3


@given(st.lists(st.tuples(st.floats(-3, 3, width=16), st.integers(0, 3)), min_size=2, max_size=12))
def test_drawn_samples_balance_and_no_advantage_explodes(pairs):
    rewards, parents = zip(*pairs, strict=True)
    sizes = Counter(parents)
    found = group_normalize(rewards, [0] * len(rewards), parents=parents)
    means = [value / sizes[parent] for value, parent in zip(found, parents, strict=True)]
    assert math.fsum(means) == pytest.approx(0.0, abs=1e-6)
    for value, parent in zip(found, parents, strict=True):
        assert abs(value) <= math.sqrt(max(len(sizes) - 1, 1) * sizes[parent]) + 1e-9
