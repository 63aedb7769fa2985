"""Estimators by name, GRPO, and whitening."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.algorithms import advantages
from vime.algorithms.advantages import AdvantageSettings, PackedSamples
from vime.algorithms.whitening import whiten


def test_an_unknown_estimator_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown advantage estimator 'gpro', known are: grpo"):
        advantages.get("gpro")


@pytest.mark.parametrize("name", advantages.names())
def test_every_estimator_gives_each_response_token_an_advantage(name):
    samples = PackedSamples(
        rewards_n=torch.tensor([0.5, -0.5]),
        lengths_n=torch.tensor([2, 1]),
        mask_t=torch.ones(3),
        log_probs_t=-torch.ones(3),
        values_t=torch.zeros(3),
    )
    assert advantages.get(name).advantages(samples, AdvantageSettings()).shape == (3,)


def test_grpo_normalizes_within_the_group():
    grpo = advantages.get("grpo")
    assert grpo.normalize_rewards([1, 0, 0, 0], [3] * 4, std=False) == [0.75, -0.25, -0.25, -0.25]
    assert grpo.normalize_rewards([1, 0, 0, 0], [3] * 4) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_grpo_gives_every_token_of_a_sample_its_reward():
    samples = PackedSamples(
        rewards_n=torch.tensor([1.5, 9.0, -0.5]),
        lengths_n=torch.tensor([3, 0, 2]),
        mask_t=torch.tensor([1, 0, 1, 1, 1]),
    )
    assert advantages.get("grpo").advantages(samples, AdvantageSettings()).tolist() == [1.5, 1.5, 1.5, -0.5, -0.5]


def test_whitening_uses_trained_tokens_and_the_sample_variance():
    # mean and variance of 1, 2, 4 are both 7/3
    whitened = whiten(torch.tensor([1.0, 2, 3, 4]), torch.tensor([1, 1, 0, 1]))
    assert whitened.tolist() == pytest.approx([-0.87287, -0.21822, 0.43644, 1.09109], abs=1e-5)


def test_whitening_without_a_trained_token_changes_nothing():
    assert whiten(torch.tensor([1.0, 2.0]), torch.zeros(2)).tolist() == [1.0, 2.0]


def test_whitening_one_token_or_equal_ones_gives_zero():
    assert whiten(torch.tensor([3.0, 5.0]), torch.tensor([1, 0]))[0] == 0
    assert whiten(torch.full((12,), 0.9), torch.ones(12)).abs().max() < 1e-6


def test_whitening_keeps_the_type():
    assert whiten(torch.tensor([1.0, 2.0]), torch.ones(2, dtype=torch.bool)).dtype == torch.float32


class Ranks:
    """All-reduce between threads, each of which plays a rank."""

    def __init__(self, count):
        self.barrier, self.sent = threading.Barrier(count, timeout=10), {}

    def sum_over_ranks(self, partial):
        self.sent[threading.get_ident()] = partial
        self.barrier.wait()
        total = sum(self.sent.values())
        self.barrier.wait()
        return total

    def whiten(self, parts, masks):
        with ThreadPoolExecutor(len(parts)) as threads:
            run = functools.partial(whiten, sum_over_ranks=self.sum_over_ranks)
            return torch.cat(list(threads.map(run, parts, masks)))


@given(
    st.lists(st.tuples(st.floats(-50, 50, width=32), st.booleans()), min_size=2, max_size=30).filter(
        lambda tokens: np.ptp([value for value, _ in tokens]) > 0.01
    ),
    st.data(),
)
def test_whitening_over_ranks_is_whitening_of_the_whole(tokens, data):
    cut = data.draw(st.integers(0, len(tokens)))
    values = torch.tensor([value for value, _ in tokens], dtype=torch.float64)
    mask = torch.tensor([flag for _, flag in tokens])
    whole = whiten(values, mask)
    whitened = Ranks(2).whiten([values[:cut], values[cut:]], [mask[:cut], mask[cut:]])
    torch.testing.assert_close(whitened, whole)


@given(st.lists(st.tuples(st.floats(-50, 50, width=32), st.booleans()), min_size=1, max_size=30))
def test_whitening_agrees_with_numpy(tokens):
    values, mask = np.array([value for value, _ in tokens]), np.array([flag for _, flag in tokens])
    trained = values[mask]
    if not len(trained):
        return
    variance = trained.var(ddof=1) if len(trained) > 1 else 0.0
    expected = (values - trained.mean()) / np.sqrt(variance + 1e-8)
    whitened = whiten(torch.from_numpy(values), torch.from_numpy(mask))
    np.testing.assert_allclose(whitened.numpy(), expected, rtol=1e-6, atol=1e-6)
