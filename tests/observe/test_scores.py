"""Means, confidence intervals and pass@k, against numbers worked out by hand and against what chance really does."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.observe.scores import average, half_width, pass_at_k, pass_rates

BINARY = st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=6), min_size=2, max_size=8)


def test_one_answer_a_prompt_has_the_plain_standard_error():
    """Deviation of [1, 0, 1, 1] is 0.5, so the standard error is 0.25 and half the interval 1.96 times that."""
    assert half_width([[1], [0], [1], [1]]) == pytest.approx(1.959964 * 0.25)


def test_answers_to_one_prompt_are_no_evidence_of_their_own():
    """Each prompt is all right or all wrong: sixteen answers tell no more than one."""
    assert half_width([[reward] * 16 for reward in (1, 0, 1, 1)]) == pytest.approx(half_width([[1], [0], [1], [1]]))


def test_prompts_of_different_sizes():
    """Around the mean 0.5, [1, 1, 0] sums to 0.5 and [0] to -0.5: sqrt(2/1 (0.25 + 0.25)) / 4 = 0.25."""
    assert average([[1, 1, 0], [0]]) == 0.5
    assert half_width([[1, 1, 0], [0]]) == pytest.approx(1.959964 * 0.25)


def test_what_cannot_be_said_is_not_said():
    assert half_width([]) is None
    assert half_width([[1, 0, 1]]) is None, "one prompt does not tell how prompts differ"
    assert half_width([[1, 0], []]) is None
    assert half_width([[1], [1]]) == 0.0
    assert math.isnan(average([]))


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """Prompts of different difficulty, four answers each: in 2,000 experiments 95 % of intervals hold the true mean."""
    rng = random.Random(0)

    def experiment():
        prompts = [[float(rng.random() < p) for _ in range(4)] for p in (rng.betavariate(1, 1) for _ in range(60))]
        return abs(average(prompts) - 0.5) <= half_width(prompts)

    assert sum(experiment() for _ in range(2000)) / 2000 == pytest.approx(0.95, abs=0.015)


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5  # 1 - C(3,2) / C(4,2)
    assert pass_at_k(4, 0, 4) == 0
    assert pass_at_k(4, 2, 4) == 1


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_right_answer(case):
    count, right, k = case
    draws = list(itertools.combinations([True] * right + [False] * (count - right), k))
    assert pass_at_k(count, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@given(BINARY)
def test_more_tries_never_hurt_and_one_try_is_the_mean(prompts):
    size = min(map(len, prompts))
    equal = [answers[:size] for answers in prompts]
    rates = pass_rates(equal)
    values = [average(rates[k]) for k in sorted(rates)]
    assert values == sorted(values)
    assert values[0] == pytest.approx(average(equal))
    assert all(0 <= value <= 1 + 1e-12 for value in values)


def test_each_k_takes_the_prompts_with_enough_answers():
    rates = pass_rates([[1, 0, 0, 0], [1, 0.5]])
    assert rates == {1: [[0.25], [0.5]], 2: [[0.5], [1.0]], 4: [[1.0]]}
