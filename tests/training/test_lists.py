"""What Megatron does to lists of tensors gives the same in few launches."""

from __future__ import annotations

import pytest
import torch
from megatron.core.optimizer import clip_grads, optimizer
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale
from torch import Tensor

from vime.platform import current
from vime.platform.megatron_lists import use_lists


@pytest.fixture(autouse=True)
def used(monkeypatch: pytest.MonkeyPatch) -> None:
    current().prepare_megatron()
    names = (
        (clip_grads, "l2_norm_impl"),
        (clip_grads, "multi_tensor_scale_impl"),
        (optimizer, "multi_tensor_scale_impl"),
        (optimizer, "_multi_tensor_copy_this_to_that"),
    )
    for module, name in names:
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", local_multi_tensor_scale)
    use_lists()


def numbers() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, device=current().device()) for size in ((5, 3), (7,), (1, 2, 4))]


NOOP = torch.zeros(1)


def test_norm() -> None:
    found, none = clip_grads.l2_norm_impl(1, NOOP, [numbers()], False)
    expected, _ = local_multi_tensor_l2_norm(1, NOOP, [numbers()], False)
    assert (found.shape, found.dtype, none) == (expected.shape, expected.dtype, None)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaling_into_others(factor: float, dtype: torch.dtype) -> None:
    found, expected = ([torch.zeros_like(each, dtype=dtype) for each in numbers()] for _ in range(2))
    optimizer.multi_tensor_scale_impl(1, NOOP, [numbers(), found], factor)
    local_multi_tensor_scale(1, NOOP, [numbers(), expected], factor)
    assert all(map(torch.equal, found, expected))


def test_scaling_in_place() -> None:
    found = numbers()
    clip_grads.multi_tensor_scale_impl(1, NOOP, [found, found], 0.1)
    assert all(map(torch.equal, found, [each * 0.1 for each in numbers()]))


def test_a_rank_without_a_share_of_a_group_scales_nothing() -> None:
    """With a distributed optimizer; in Megatron's copies and in place."""
    empty: list[Tensor] = []
    clip_grads.multi_tensor_scale_impl(1, NOOP, [empty, empty], 0.1)
    optimizer.multi_tensor_scale_impl(1, NOOP, [[], []], 1.0)


def test_copies_round_to_the_type_of_weights() -> None:
    weights = [torch.nn.Parameter(torch.zeros_like(each, dtype=torch.bfloat16)) for each in numbers()]
    optimizer._multi_tensor_copy_this_to_that(numbers(), [weight.data for weight in weights])
    assert all(map(torch.equal, weights, [each.bfloat16() for each in numbers()]))
    optimizer._multi_tensor_copy_this_to_that([], [])
