"""Reductions: the whole is the sum of its parts, whatever the packing."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.algorithms.reduce import by_length, per_sample, per_token, segment_mean, segment_sum

LENGTHS = torch.tensor([4, 2])
VALUES = torch.tensor([1.0, 1, 1, 1, 2, 2])


def test_per_sample_weighs_samples_alike():
    assert per_sample(torch.ones(6), LENGTHS, num_samples=2)(VALUES).item() == pytest.approx(1.5)


def test_per_token_weighs_tokens_alike():
    assert per_token(torch.ones(6), num_tokens=6)(VALUES).item() == pytest.approx(4 / 3)


def test_a_constant_length_lets_long_samples_weigh_more():
    # (4 + 4) / 8 tokens, and 2 samples
    assert by_length(torch.ones(6), num_samples=2, length=8)(VALUES).item() == pytest.approx(0.5)
    mask = torch.tensor([1, 1, 0, 0, 1, 0])
    assert by_length(mask, num_samples=2, length=8)(VALUES).item() == pytest.approx((2 + 2) / 8 / 2)


def test_the_mean_of_each_sample_over_its_trained_tokens():
    mask = torch.tensor([1, 1, 0, 0, 0, 0])
    values = torch.tensor([1.0, 3.0, float("nan"), 0, 5, 7])
    assert segment_mean(values, mask, LENGTHS).tolist() == [2, 0]
    assert segment_mean(values, mask, LENGTHS, total=True).tolist() == [4, 0]


def test_a_fully_masked_sample_counts_in_both_denominators():
    mask = torch.tensor([1, 1, 1, 1, 0, 0])
    assert per_sample(mask, LENGTHS, num_samples=2)(VALUES).item() == pytest.approx(0.5)  # (1 + 0) / 2
    assert per_token(mask, num_tokens=5)(VALUES).item() == pytest.approx(0.8)  # 4 / (4 + 1)


def test_what_stands_at_masked_tokens_does_not_matter():
    values = torch.tensor([1.0, float("nan"), 3.0, float("inf")], requires_grad=True)
    loss = per_sample(torch.tensor([1, 0, 1, 0]), torch.tensor([4]), num_samples=1)(values)
    loss.backward()
    assert loss.item() == 2.0
    assert values.grad.tolist() == [0.5, 0, 0.5, 0]


def test_a_mask_may_be_bool_and_values_bool_or_bfloat16():
    reduce = per_sample(torch.tensor([True, True, False]), torch.tensor([3]), num_samples=1)
    assert reduce(torch.tensor([True, False, True])).item() == 0.5
    assert reduce(torch.ones(3, dtype=torch.bfloat16)).dtype == torch.float32


def test_a_part_of_a_sample_needs_the_count_of_the_whole():
    # 4 trained tokens of which this rank holds 2
    half = per_sample(torch.ones(2), torch.tensor([2]), num_samples=1, trained_tokens_n=torch.tensor([4]))
    assert half(torch.ones(2)).item() == 0.5


def test_segment_sums_keep_empty_samples_and_the_gradient():
    values = torch.tensor([1.0, 2, 4], requires_grad=True)
    sums = segment_sum(values, torch.tensor([0, 2, 0, 1]))
    (sums * torch.tensor([1.0, 10, 100, 1000])).sum().backward()
    assert sums.tolist() == [0, 3, 0, 4]
    assert values.grad.tolist() == [10, 10, 1000]


SAMPLES = st.lists(
    st.lists(st.tuples(st.floats(-10, 10, width=32), st.booleans()), min_size=1, max_size=9), min_size=1, max_size=8
)


def reference(samples, *, token_level):
    """The formulas as loops over samples and tokens."""
    sums = [sum(x for x, m in sample if m) for sample in samples]
    counts = [max(sum(m for _, m in sample), 1) for sample in samples]
    if token_level:
        return sum(sums) / sum(counts)
    return float(np.mean([total / count for total, count in zip(sums, counts, strict=True)]))


def pack(samples):
    values, mask = zip(*(token for sample in samples for token in sample), strict=True)
    return torch.tensor(values), torch.tensor(mask), torch.tensor([len(sample) for sample in samples])


def reductions(samples, part):
    """Both reductions for one micro-batch of the step."""
    values, mask, lengths = pack(part)
    num_tokens = sum(max(sum(m for _, m in sample), 1) for sample in samples)
    return values, per_sample(mask, lengths, num_samples=len(samples)), per_token(mask, num_tokens=num_tokens)


@given(SAMPLES, st.data())
def test_a_constant_length_agrees_with_the_formula(samples, data):
    length = data.draw(st.floats(1, 50))
    values, mask, lengths = pack(samples)
    expected = np.mean([sum(x for x, m in sample if m) / length for sample in samples])
    assert by_length(mask, num_samples=len(samples), length=length)(values).item() == pytest.approx(expected, abs=1e-4)
    means = [np.mean([x for x, m in sample if m] or [0.0]) for sample in samples]
    np.testing.assert_allclose(segment_mean(values, mask, lengths).numpy(), means, atol=1e-5)


@given(SAMPLES, st.data())
def test_micro_batches_add_up_to_the_whole_step(samples, data):
    cut = data.draw(st.integers(0, len(samples)))
    sums = [0.0, 0.0]
    for part in filter(None, (samples[:cut], samples[cut:])):
        values, *both = reductions(samples, part)
        sums = [total + reduce(values).item() for total, reduce in zip(sums, both, strict=True)]
    assert sums[0] == pytest.approx(reference(samples, token_level=False), abs=1e-4)
    assert sums[1] == pytest.approx(reference(samples, token_level=True), abs=1e-4)


@given(SAMPLES)
def test_the_gradient_is_that_of_the_naive_formula(samples):
    values, per_sample_loss, per_token_loss = reductions(samples, samples)
    for reduce, token_level in ((per_sample_loss, False), (per_token_loss, True)):
        packed, naive = values.clone().requires_grad_(), values.clone().requires_grad_()
        reduce(packed.square()).backward()
        masks = [torch.tensor([float(m) for _, m in sample]) for sample in samples]
        parts = naive.square().split([len(sample) for sample in samples])
        sums = torch.stack([(x * m).sum() for x, m in zip(parts, masks, strict=True)])
        counts = torch.stack([m.sum().clamp(min=1) for m in masks])
        (sums.sum() / counts.sum() if token_level else (sums / counts).mean()).backward()
        torch.testing.assert_close(packed.grad, naive.grad)
