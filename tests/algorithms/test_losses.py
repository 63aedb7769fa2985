"""Policy loss and KL: golden numbers, an independent reference, gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.algorithms.kl import KINDS, kl
from vime.algorithms.policy_loss import ClipRange, policy_loss, sequence_policy_loss, weighted_policy_loss
from vime.algorithms.ratio import log_ratio

LOG_PROBS = st.floats(-12, 0, width=32)


def log_of(*ratios):
    return torch.tensor(ratios, dtype=torch.float64).log()


def test_log_ratios_are_clamped_at_20_and_marked():
    ratio = log_ratio(torch.tensor([-1.0, -1.0, -50.0, 0.0]), torch.tensor([-2.0, -21.0, -1.0, -1000.0]))
    assert ratio.values_t.tolist() == [1.0, 20.0, -20.0, 20.0]
    assert ratio.clamped_t.tolist() == [False, False, True, True]


def test_nan_stays_visible():
    assert log_ratio(torch.tensor([math.nan]), torch.tensor([0.0])).values_t.isnan().all()


class TestPolicyLoss:
    RATIOS, ADVANTAGES = (1.5, 1.5, 0.5, 0.5, 5.0), [1.0, -1, 1, -1, -1]

    def loss(self, clip):
        return policy_loss(
            log_of(*self.RATIOS), torch.zeros(5).double(), torch.tensor(self.ADVANTAGES, dtype=torch.float64), clip
        )

    def test_clip(self):
        result = self.loss(ClipRange(low=0.2, high=0.28))
        assert result.loss_t.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8, 5])
        assert result.clipped_t.tolist() == [True, False, False, True, False]
        assert not result.clamped_t.any()

    def test_dual_clip_holds_what_a_negative_advantage_can_cost(self):
        result = self.loss(ClipRange(low=0.2, high=0.28, dual=3))
        assert result.loss_t.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8, 3])
        assert result.clipped_t.tolist() == [True, False, False, True, True]

    def test_the_first_step_has_ratio_one_and_no_clip(self):
        log_probs = torch.tensor([-1.0, -2.0])
        result = policy_loss(log_probs, log_probs, torch.tensor([0.5, -0.5]), ClipRange())
        assert result.loss_t.tolist() == [-0.5, 0.5]
        assert not result.clipped_t.any()

    def test_a_ratio_beyond_all_bounds_is_finite_and_marked(self):
        log_probs = torch.tensor([0.0], requires_grad=True)
        result = policy_loss(log_probs, torch.tensor([-1e4]), torch.tensor([-1.0]), ClipRange())
        result.loss_t.sum().backward()
        assert result.loss_t.item() == pytest.approx(math.exp(20))
        assert result.clamped_t.all()
        assert log_probs.grad.isfinite().all()

    @pytest.mark.parametrize("dual", [1.0, 0.5, -3])
    def test_the_dual_clip_must_be_above_one(self, dual):
        with pytest.raises(ValueError, match="above 1"):
            ClipRange(dual=dual)


def reference_loss(log_probs, old_log_probs, advantages, low, high, dual):
    """PPO's objective token by token, in the form of the paper: what to maximize."""
    losses = []
    for new, old, advantage in zip(log_probs, old_log_probs, advantages, strict=True):
        ratio = np.exp(np.clip(new - old, -20, 20))
        objective = min(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)
        if dual is not None and advantage < 0:
            objective = max(objective, dual * advantage)
        losses.append(-objective)
    return np.array(losses)


TOKENS = st.lists(st.tuples(LOG_PROBS, LOG_PROBS, st.floats(-3, 3, width=32)), min_size=1, max_size=20)


@given(TOKENS, st.floats(0.05, 0.5), st.floats(0.05, 0.5), st.sampled_from([None, 1.5, 3.0]))
def test_policy_loss_agrees_with_the_reference(tokens, low, high, dual):
    new, old, advantages = np.array(tokens, dtype=np.float64).T
    result = policy_loss(*map(torch.tensor, (new, old, advantages)), ClipRange(low=low, high=high, dual=dual))
    np.testing.assert_allclose(result.loss_t.numpy(), reference_loss(new, old, advantages, low, high, dual))


@given(TOKENS, st.sampled_from([None, 3.0]))
def test_the_gradient_is_minus_ratio_times_advantage_where_no_clip_decides(tokens, dual):
    new, old, advantages = torch.tensor(tokens, dtype=torch.float64).T
    new = new.clone().requires_grad_()
    result = policy_loss(new, old, advantages, ClipRange(dual=dual))
    result.loss_t.sum().backward()
    expected = torch.where(result.clipped_t, 0.0, -(new - old).exp() * advantages).detach()
    at_the_edge = ((new - old).exp() - torch.tensor([[0.8], [1.2]])).abs().amin(0) < 1e-6
    torch.testing.assert_close(new.grad[~at_the_edge], expected[~at_the_edge])


class TestSequencePolicyLoss:
    """GSPO."""

    def test_the_ratio_is_the_geometric_mean_of_the_trained_tokens(self):
        # (.1 - .2) / 2 = -.05, the third token is not trained
        new, old = torch.tensor([-1, -1.2, -0.8]).double(), torch.tensor([-1.1, -1, -1]).double()
        loss = sequence_policy_loss(new, old, torch.ones(3), torch.tensor([1, 1, 0]), torch.tensor([3]), ClipRange())
        assert loss.loss_t.tolist() == pytest.approx([-0.95123] * 3, abs=1e-5)
        assert not loss.clipped_t.any()

    def test_what_stands_at_masked_tokens_does_not_matter(self):
        new = torch.tensor([-1.0, math.nan], requires_grad=True)
        mask, lengths = torch.tensor([1, 0]), torch.tensor([2])
        loss = sequence_policy_loss(new, torch.tensor([-1.0, 5.0]), torch.ones(2), mask, lengths, ClipRange())
        loss.loss_t[0].backward()
        assert loss.loss_t[0] == -1
        assert new.grad.tolist() == [-1, 0]

    def test_a_sequence_beyond_all_bounds_is_marked_as_a_whole(self):
        new, old = torch.zeros(3), torch.tensor([-1.0, -100.0, -2.0])
        loss = sequence_policy_loss(new, old, -torch.ones(3), torch.ones(3), torch.tensor([2, 1]), ClipRange())
        assert loss.clamped_t.tolist() == [True, True, False]
        assert loss.loss_t.tolist() == pytest.approx([math.exp(20)] * 2 + [math.exp(2)])


class TestWeightedPolicyLoss:
    """CISPO."""

    RATIOS, ADVANTAGES = (1.5, 1.5, 0.5, 0.5, 5.0), [1.0, -1, 1, -1, -1]

    def test_the_clipped_ratio_is_the_weight_of_the_log_prob(self):
        old = -log_of(*self.RATIOS) - 1
        new = torch.full((5,), -1.0, dtype=torch.float64, requires_grad=True)
        advantages = torch.tensor(self.ADVANTAGES, dtype=torch.float64)
        loss = weighted_policy_loss(new, old, advantages, ClipRange(low=0.2, high=0.28))
        loss.loss_t.sum().backward()
        weights = torch.tensor([1.28, 1.28, 0.8, 0.8, 1.28], dtype=torch.float64)
        torch.testing.assert_close(loss.loss_t, weights * advantages)  # log π is -1
        torch.testing.assert_close(new.grad, -weights * advantages)
        assert loss.clipped_t.all()


SEQUENCES = st.lists(
    st.lists(st.tuples(LOG_PROBS, LOG_PROBS, st.booleans()), min_size=1, max_size=8), min_size=1, max_size=5
)


@given(SEQUENCES, st.floats(0.05, 0.5), st.floats(0.05, 0.5), st.sampled_from([None, 1.5]))
def test_sequence_policy_loss_agrees_with_the_reference(samples, low, high, dual):
    expected, gradients = [], []
    for i, sample in enumerate(samples):
        new, old, mask = np.array(sample, dtype=np.float64).T
        advantage, trained = (-1.0) ** i * (i + 1), max(mask.sum(), 1)
        mean = np.clip((mask * (new - old)).sum() / trained, -20, 20)
        loss = reference_loss([mean], [0.0], [advantage], low, high, dual)[0]
        expected += [loss] * len(sample)
        free = loss == -np.exp(mean) * advantage
        gradients.append(free * loss * len(sample) * mask / trained)
    new, old, mask = torch.tensor([token for sample in samples for token in sample], dtype=torch.float64).T
    new = new.clone().requires_grad_()
    lengths = torch.tensor([len(sample) for sample in samples])
    advantages = torch.tensor([(-1.0) ** i * (i + 1) for i in range(len(samples))]).double().repeat_interleave(lengths)
    clip = ClipRange(low=low, high=high, dual=dual)
    found = sequence_policy_loss(new, old, advantages, mask, lengths, clip)
    found.loss_t.sum().backward()
    np.testing.assert_allclose(found.loss_t.detach().numpy(), expected)
    if not found.clipped_t.any():
        np.testing.assert_allclose(new.grad.numpy(), np.concatenate(gradients), atol=1e-12)


@given(TOKENS, st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_weighted_policy_loss_agrees_with_the_reference(tokens, low, high):
    new, old, advantages = np.array(tokens, dtype=np.float64).T
    weights = np.clip(np.exp(new - old), 1 - low, 1 + high)
    log_probs = torch.tensor(new, requires_grad=True)
    found = weighted_policy_loss(log_probs, torch.tensor(old), torch.tensor(advantages), ClipRange(low=low, high=high))
    found.loss_t.sum().backward()
    np.testing.assert_allclose(found.loss_t.detach().numpy(), -weights * advantages * new)
    np.testing.assert_allclose(log_probs.grad.numpy(), -weights * advantages)


@pytest.mark.parametrize(
    ("kind", "at_half", "at_minus_three"),
    [("k1", 0.5, -3), ("k2", 0.125, 4.5), ("k3", 0.106531, 16.0855), ("low_var_kl", 0.106531, 10)],
)
def test_kl_estimates(kind, at_half, at_minus_three):
    estimate = kl(torch.tensor([0.5, -3.0]), torch.zeros(2), kind)
    assert estimate.values_t.tolist() == pytest.approx([at_half, at_minus_three], rel=1e-5)


def test_an_unknown_kl_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown KL estimator 'k4', known are: k1, k2, k3, low_var_kl"):
        kl(torch.zeros(1), torch.zeros(1), "k4")


@pytest.mark.parametrize("kind", KINDS)
def test_kl_of_the_same_policy_is_zero(kind):
    log_probs = torch.tensor([-0.3, -5.0])
    assert kl(log_probs, log_probs, kind).values_t.tolist() == [0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_kl_stays_finite_and_says_where_it_was_clamped(kind):
    estimate = kl(torch.tensor([-900.0, -1.0]), torch.tensor([-1.0, -1.0]), kind)
    assert estimate.values_t.isfinite().all()
    assert estimate.clamped_t.tolist() == [True, False]


@given(
    st.lists(st.tuples(LOG_PROBS, LOG_PROBS, LOG_PROBS), min_size=1, max_size=20), st.sampled_from(KINDS), st.booleans()
)
def test_kl_agrees_with_the_reference(tokens, kind, unbiased):
    new, ref, old = np.array(tokens, dtype=np.float64).T
    d = new - ref
    expected = {"k1": d, "k2": d**2 / 2}.get(kind, np.exp(-d) - 1 + d)
    if unbiased:
        expected = expected * np.exp(new - old)
    if kind == "low_var_kl":
        expected = np.clip(expected, -10, 10)
    old_log_probs = torch.tensor(old) if unbiased else None
    estimate = kl(torch.tensor(new), torch.tensor(ref), kind, old_log_probs_t=old_log_probs)
    np.testing.assert_allclose(estimate.values_t.numpy(), expected, rtol=1e-9, atol=1e-12)


def exact_kl(logits, ref_logits):
    log_p, log_q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_unbiased_estimate_has_the_gradient_of_the_exact_kl(kind):
    """Expectation over all tokens of a small vocabulary, sampled from the old policy, of value and gradient."""
    generator = torch.Generator().manual_seed(0)
    logits, ref_logits, old_logits = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    estimated, exact = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    old_log_probs = old_logits.log_softmax(-1)
    values = kl(estimated.log_softmax(-1), ref_logits.log_softmax(-1), kind, old_log_probs_t=old_log_probs).values_t
    expectation = (old_log_probs.exp() * values).sum()
    expectation.backward()
    exact_kl(exact, ref_logits).backward()
    assert expectation.item() == pytest.approx(exact_kl(exact, ref_logits).item())
    torch.testing.assert_close(estimated.grad, exact.grad)
