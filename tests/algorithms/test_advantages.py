"""Estimators by name, their golden numbers, an independent reference of returns, and whitening."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.algorithms import advantages
from vime.algorithms.advantages import AdvantageSettings, PackedSamples, base
from vime.algorithms.advantages.grpo import Grpo
from vime.algorithms.whitening import whiten

KNOWN = ("cispo", "grpo", "gspo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def test_an_unknown_estimator_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown advantage estimator 'gpro', known are: ") as refused:
        advantages.get("gpro")
    assert all(name in str(refused.value) for name in KNOWN)
    assert set(KNOWN) <= set(advantages.names())


def test_a_class_with_a_name_is_all_that_a_new_estimator_needs():
    class Sign(Grpo, name="sign_of_the_test"):
        def advantages(self, samples, settings):
            return samples.per_token(samples.rewards_n.sign())

    assert "sign_of_the_test" in advantages.names()
    found = advantages.get("sign_of_the_test").advantages(packed([3.0, -2.0], [1, 2]), AdvantageSettings())
    assert found.tolist() == [1, -1, -1]
    with pytest.raises(TypeError, match="two advantage estimators are called 'sign_of_the_test'"):

        class Again(Grpo, name="sign_of_the_test"):
            pass

    del base._ESTIMATORS["sign_of_the_test"]


def packed(rewards, lengths, mask=None, kl=None, values=None):
    tokens = sum(lengths)
    return PackedSamples(
        rewards_n=torch.tensor(rewards),
        lengths_n=torch.tensor(lengths),
        mask_t=torch.ones(tokens) if mask is None else torch.tensor(mask),
        log_probs_t=None if kl is None else torch.tensor(kl),
        ref_log_probs_t=torch.zeros(tokens),
        values_t=torch.zeros(tokens) if values is None else torch.tensor(values),
    )


@pytest.mark.parametrize("name", advantages.names())
def test_an_estimator_takes_the_flags_that_change_what_it_does_and_no_others(name):
    estimator, groups = advantages.get(name), [0, 0, 0, 1, 1]
    rewards = [1.0, 0.0, 4.0, 2.0, 3.0]
    samples = packed(rewards, [3, 2, 1, 4, 2], kl=[0.1] * 12, values=[0.5, 0.25, 1.0] * 4)
    plain = estimator.advantages(samples, AdvantageSettings())
    changes = {
        flag for flag in ("gamma", "lambd")
        if not torch.equal(plain, estimator.advantages(samples, AdvantageSettings(**{flag: 0.5})))
    }  # fmt: skip
    normalized = estimator.normalize_rewards(rewards, groups)
    if normalized != rewards:
        changes.add("disable_rewards_normalization")
    if normalized != estimator.normalize_rewards(rewards, groups, std=False):
        changes.add("disable_grpo_std_normalization")
    assert estimator.takes == changes
    assert changes <= set(advantages.TAKEN)


@pytest.mark.parametrize("name", advantages.names())
@pytest.mark.parametrize("lengths", [[2, 1], [3, 0, 2], [1]])
def test_every_estimator_gives_each_response_token_an_advantage(name, lengths):
    samples = packed([0.5] * len(lengths), lengths, kl=[0.1] * sum(lengths))
    found = advantages.get(name).advantages(samples, AdvantageSettings(kl_coef=0.1, gamma=0.9, lambd=0.9))
    assert found.shape == (sum(lengths),)
    assert found.dtype == torch.float32
    assert found.isfinite().all()


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_group_relative_rewards_are_divided_by_the_deviation(name):
    estimator = advantages.get(name)
    assert estimator.normalize_rewards([1, 0, 0, 0], [3] * 4, std=False) == [0.75, -0.25, -0.25, -0.25]
    assert estimator.normalize_rewards([1, 0, 0, 0], [3] * 4) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_every_token_of_a_sample_gets_its_reward(name):
    samples = packed([1.5, 9.0, -0.5], [3, 0, 2], mask=[1, 0, 1, 1, 1])
    found = advantages.get(name).advantages(samples, AdvantageSettings())
    assert found.tolist() == [1.5, 1.5, 1.5, -0.5, -0.5]


class TestReinforcePlusPlus:
    def found(self, samples, **settings):
        return advantages.get("reinforce_plus_plus").advantages(samples, AdvantageSettings(**settings))

    def test_rewards_stay_as_they_are(self):
        estimator = advantages.get("reinforce_plus_plus")
        assert estimator.normalize_rewards([1, 0, 0.5], [0, 0, 1]) == [1.0, 0.0, 0.5]
        with pytest.raises(ValueError, match="position 1"):
            estimator.normalize_rewards([1, float("nan")], [0, 0])

    def test_returns_are_discounted_and_pay_for_the_kl(self):
        # r = -.01, -.02, 1 - .03; G = .97; -.02 + .9 * .97; -.01 + .9 * .853
        found = self.found(packed([1.0], [3], kl=[0.1, 0.2, 0.3]), kl_coef=0.1, gamma=0.9)
        assert found.tolist() == pytest.approx([0.7577, 0.853, 0.97])

    def test_tokens_of_others_neither_discount_nor_pay(self):
        # only tokens 0 and 2 are trained: G_2 = 1 - .03 = .97, G_0 = -.01 + .9 * .97
        found = self.found(packed([1.0], [4], mask=[1, 0, 1, 0], kl=[0.1, 9.0, 0.3, 9.0]), kl_coef=0.1, gamma=0.9)
        assert found.tolist() == pytest.approx([0.863, 0, 0.97, 0])

    def test_a_sample_without_a_trained_token_is_left_out(self):
        assert self.found(packed([1.0, 2.0], [2, 2], mask=[0, 0, 1, 1])).tolist() == [0, 0, 2, 2]


def test_the_baseline_of_reinforce_plus_plus_is_the_mean_of_the_group():
    estimator = advantages.get("reinforce_plus_plus_baseline")
    assert estimator.normalize_rewards([1, 0, 0, 0], [3] * 4) == [0.75, -0.25, -0.25, -0.25]
    samples = packed([0.75, -0.25], [2, 1], kl=[0.1, 0.2, 0.3])
    found = estimator.advantages(samples, AdvantageSettings(kl_coef=0.5))
    assert found.tolist() == pytest.approx([0.7, 0.65, -0.4])


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_what_needs_whitening_says_so(name):
    assert advantages.get(name).needs_whitening
    assert advantages.get(name).takes_kl


def numpy_returns(rewards, mask, gamma):
    """One sample, from its end."""
    found, following = np.zeros(len(rewards)), 0.0
    for t in reversed(range(len(rewards))):
        if mask[t]:
            following = found[t] = rewards[t] + gamma * following
    return found


@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 3)), min_size=1, max_size=12), st.floats(0, 0.5))
def test_the_baseline_agrees_with_numpy(pairs, kl_coef):
    rewards, groups = np.array([reward for reward, _ in pairs]), np.array([group for _, group in pairs])
    estimator = advantages.get("reinforce_plus_plus_baseline")
    centred = estimator.normalize_rewards(rewards.tolist(), groups.tolist())
    expected = rewards - np.array([rewards[groups == group].mean() for group in groups])
    np.testing.assert_allclose(centred, expected, atol=3e-6)  # what hardly differs counts as equal
    kl = np.linspace(-1, 1, 2 * len(rewards))
    samples = PackedSamples(
        rewards_n=torch.tensor(centred, dtype=torch.float64),
        lengths_n=torch.full((len(rewards),), 2),
        mask_t=torch.ones(len(kl)),
        log_probs_t=torch.from_numpy(kl),
        ref_log_probs_t=torch.zeros(len(kl), dtype=torch.float64),
    )
    found = estimator.advantages(samples, AdvantageSettings(kl_coef=kl_coef))
    np.testing.assert_allclose(found.numpy(), np.repeat(centred, 2) - kl_coef * kl)


TOKEN_SAMPLES = st.lists(
    st.lists(st.tuples(st.floats(-5, 5, width=32), st.booleans()), max_size=12), min_size=1, max_size=6
)


@given(TOKEN_SAMPLES, st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.floats(0, 0.5))
def test_returns_agree_with_numpy(samples, gamma, kl_coef):
    lengths = [len(sample) for sample in samples]
    kl = np.array([value for sample in samples for value, _ in sample])
    mask = np.array([flag for sample in samples for _, flag in sample], dtype=bool)
    scores = np.linspace(-1, 1, len(samples))
    expected = []
    for score, k, m in zip(
        scores, np.split(kl, np.cumsum(lengths)[:-1]), np.split(mask, np.cumsum(lengths)[:-1]), strict=True
    ):
        rewards = -kl_coef * k
        if m.any():
            rewards[np.flatnonzero(m)[-1]] += score
        expected.append(numpy_returns(rewards, m, gamma))
    packed_samples = PackedSamples(
        rewards_n=torch.from_numpy(scores),
        lengths_n=torch.tensor(lengths),
        mask_t=torch.from_numpy(mask),
        log_probs_t=torch.from_numpy(kl),
        ref_log_probs_t=torch.zeros(len(kl), dtype=torch.float64),
    )
    estimator = advantages.get("reinforce_plus_plus")
    found = estimator.advantages(packed_samples, AdvantageSettings(kl_coef=kl_coef, gamma=gamma))
    np.testing.assert_allclose(found.numpy(), np.concatenate(expected), rtol=1e-9, atol=1e-9)


def test_whitening_uses_trained_tokens_and_the_sample_variance():
    # mean and variance of 1, 2, 4 are both 7/3
    whitened = whiten(torch.tensor([1.0, 2, 3, 4]), torch.tensor([1, 1, 0, 1]))
    assert whitened.tolist() == pytest.approx([-0.87287, -0.21822, 0.43644, 1.09109], abs=1e-5)


def test_what_stands_at_masked_tokens_does_not_spread():
    whitened = whiten(torch.tensor([1.0, 2, float("nan"), 4]), torch.tensor([1, 1, 0, 1]))
    assert whitened[[0, 1, 3]].tolist() == pytest.approx([-0.87287, -0.21822, 1.09109], abs=1e-5)


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
