"""Off-policy corrections: golden numbers, and an independent reference that goes sample by sample."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.algorithms.corrections import ImportanceSampling, importance_weights, off_policy_sequences

LOG_WEIGHTS = [1.0, -3.0, 0.3]


def weights_of(log_weights, lengths=None, mask=None, **settings):
    """The correction of tokens whose log-ratio of trainer to engine is given."""
    count = len(log_weights)
    return importance_weights(
        torch.tensor(log_weights) - 2,
        torch.full((count,), -2.0),
        torch.ones(count) if mask is None else torch.tensor(mask),
        torch.tensor(lengths or [count]),
        ImportanceSampling(**settings),
    )


class TestTokens:
    def test_truncated_importance_sampling(self):
        correction = weights_of(LOG_WEIGHTS)
        assert correction.weights_t.tolist() == pytest.approx([2, 0.0498, 1.3499], abs=1e-4)
        assert correction.ratios_t.tolist() == pytest.approx([math.e, 0.0498, 1.3499], abs=1e-4)
        assert correction.bounded_t.tolist() == [True, False, False]

    def test_with_a_lower_clip(self):
        assert weights_of(LOG_WEIGHTS, low=0.5).weights_t.tolist() == pytest.approx([2, 0.5, 1.3499], abs=1e-4)

    def test_icepop_leaves_out_what_is_outside_of_the_bounds(self):
        correction = weights_of(LOG_WEIGHTS, mode="mask", low=0.5)
        assert correction.weights_t.tolist() == pytest.approx([0, 0, 1.3499], abs=1e-4)
        assert correction.bounded_t.tolist() == [True, True, False]

    def test_the_same_policy_weighs_one(self):
        assert weights_of([0.0, 0.0]).weights_t.tolist() == [1, 1]

    def test_ratios_beyond_all_bounds_are_finite_and_marked(self):
        correction = weights_of([900.0, -900.0, 0.0], mode="truncate", high=1e30)
        assert correction.weights_t.tolist() == pytest.approx([math.exp(20), math.exp(-20), 1])
        assert correction.clamped_t.tolist() == [True, True, False]


class TestSequences:
    # trained log-ratios .6 and .2 of the first sample, -.1 of the second
    LOG_RATIOS, LENGTHS, MASK = [0.6, 5.0, 0.2, -0.1], [3, 1], [1, 0, 1, 1]

    def test_the_product_over_trained_tokens(self):
        correction = weights_of(self.LOG_RATIOS, self.LENGTHS, self.MASK, level="sequence")
        assert correction.weights_t.tolist() == pytest.approx([2, 2, 2, math.exp(-0.1)])
        assert correction.ratios_t.tolist() == pytest.approx([math.exp(0.8)] * 3 + [math.exp(-0.1)])

    def test_their_geometric_mean(self):
        correction = weights_of(self.LOG_RATIOS, self.LENGTHS, self.MASK, level="geometric")
        assert correction.weights_t.tolist() == pytest.approx([math.exp(0.4)] * 3 + [math.exp(-0.1)])

    def test_a_sequence_out_of_bounds_is_left_out_as_a_whole(self):
        correction = weights_of(self.LOG_RATIOS, self.LENGTHS, self.MASK, level="sequence", mode="mask")
        assert correction.weights_t.tolist() == pytest.approx([0, 0, 0, math.exp(-0.1)])

    def test_one_impossible_trained_token_vetoes_its_sample(self):
        # exp(-10) = 4.5e-5 is below the threshold; the masked token of the second sample does not count
        correction = weights_of([0.1, -10.0, 0.0, -10.0], [2, 2], [1, 1, 1, 0], veto=1e-4)
        assert correction.weights_t.tolist() == pytest.approx([0, 0, 1, math.exp(-10)])
        assert correction.vetoed_t.tolist() == [True, True, False, False]

    def test_a_sample_without_a_trained_token_weighs_one(self):
        assert weights_of([3.0], mask=[0], level="geometric").weights_t.tolist() == [1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"low": 3.0}, "0 <= low <= high, not 3 and 2"),
        ({"low": -1.0}, "not -1 and 2"),
        ({"low": 0.5, "mode": "truncate"}, "truncation has no lower bound, so 0.5 has no meaning"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ImportanceSampling(**settings)


def test_no_gradient_goes_through_a_weight():
    old = torch.zeros(2, requires_grad=True)
    weights = importance_weights(old, torch.ones(2), torch.ones(2), torch.tensor([2]), ImportanceSampling()).weights_t
    assert not weights.requires_grad


SAMPLES = st.lists(
    st.lists(
        st.tuples(st.floats(-12, 0, width=32), st.floats(-12, 0, width=32), st.booleans()), min_size=1, max_size=8
    ),
    min_size=1,
    max_size=5,
)


def packed(samples):
    first, second, mask = torch.tensor([token for sample in samples for token in sample], dtype=torch.float64).T
    return first, second, mask.bool(), torch.tensor([len(sample) for sample in samples])


def reference_weights(sample, level, mode, low, high, veto):
    """One sample, in NumPy."""
    old, rollout, mask = np.array(sample, dtype=np.float64).T
    logs = old - rollout
    if level == "sequence":
        logs = np.full(len(logs), (mask * logs).sum())
    if level == "geometric":
        logs = np.full(len(logs), (mask * logs).sum() / max(mask.sum(), 1))
    ratios = np.exp(np.clip(logs, -20, 20))
    if mode == "truncate":
        weights = np.minimum(ratios, high)
    elif mode == "clip":
        weights = np.clip(ratios, low, high)
    else:
        weights = np.where((ratios >= low) & (ratios <= high), ratios, 0)
    vetoed = veto is not None and any(np.exp(old - rollout)[mask == 1] < veto)
    return np.zeros(len(weights)) if vetoed else weights


@given(
    SAMPLES,
    st.sampled_from(["token", "sequence", "geometric"]),
    st.sampled_from(["truncate", "clip", "mask"]),
    st.floats(0, 1),
    st.floats(1, 5),
    st.sampled_from([None, 1e-4, 0.01]),
)
def test_weights_agree_with_the_reference(samples, level, mode, low, high, veto):
    low = 0.0 if mode == "truncate" else low
    settings = ImportanceSampling(level=level, mode=mode, low=low, high=high, veto=veto)
    found = importance_weights(*packed(samples), settings).weights_t
    expected = np.concatenate([reference_weights(sample, level, mode, low, high, veto) for sample in samples])
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)


def left_out(new, old, advantages, lengths, mask=None, delta=0.1):
    mask = torch.ones(len(new)) if mask is None else torch.tensor(mask)
    arguments = map(torch.tensor, (new, old, advantages))
    return off_policy_sequences(*arguments, mask, torch.tensor(lengths), delta=delta).tolist()


def test_bad_answers_that_the_policy_left_behind_are_left_out():
    # mean of log π_old - log π: .2 and 0
    assert left_out([-1.3, -1.1, -1.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0], [2, 1]) == [True, True, False]


def test_good_answers_stay_and_so_do_those_that_became_likelier():
    assert left_out([-1.3, -0.5], [-1.0, -1.0], [1.0, -1.0], [1, 1]) == [False, False]


def test_only_trained_tokens_say_how_far_the_policy_went():
    assert left_out([-9.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [2], mask=[0, 1]) == [False, False]


@given(SAMPLES, st.floats(0, 2))
def test_sequence_masks_agree_with_the_reference(samples, delta):
    new, old, mask, lengths = packed(samples)
    advantages = torch.linspace(-1, 1, len(new)).double()
    expected = []
    for sample, a in zip(samples, advantages.split(lengths.tolist()), strict=True):
        x, y, m = np.array(sample, dtype=np.float64).T
        mean = (m * (y - x)).sum() / max(m.sum(), 1)
        expected += [(mean > delta) and value < 0 for value in a.tolist()]
    assert off_policy_sequences(new, old, advantages, mask, lengths, delta=delta).tolist() == expected
