"""Whitening of advantages over every rank that holds tokens of the rollout (--normalize-advantages)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["whiten"]

VARIANCE_EPSILON = 1e-8


def whiten(
    advantages_t: Tensor,
    mask_t: Tensor,
    *,
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda partial: partial,
) -> Tensor:
    """``(A - mean) / sqrt(variance + 1e-8)``, mean and variance of the trained tokens of all ranks.

    The variance has Bessel's correction. Two sums go over the wire, one after the other: the variance is that of the
    deviations from the mean of all ranks, so that a large mean does not swallow it. Sums are float64.

    Args:
        advantages_t: float [t].
        mask_t: bool or 0/1 [t], the tokens that are trained.
        sum_over_ranks: adds up a float64 tensor of every rank; it is called twice on each rank, also on one that holds
            no token. The default is for a single rank.

    Returns:
        Like ``advantages_t``. Masked tokens are moved and scaled too; what stands there does not matter, even NaN.
        Without any trained token the input comes back unscaled.
    """
    values_t = advantages_t.double()
    weights_t = mask_t.double()
    trained_t = values_t.masked_fill(weights_t == 0, 0.0)
    count, total = sum_over_ranks(torch.stack((weights_t.sum(), (weights_t * trained_t).sum())))
    if count == 0:
        sum_over_ranks(torch.zeros_like(total))
        return advantages_t
    deviations_t = values_t - total / count
    squares = sum_over_ranks((weights_t * (trained_t - total / count).square()).sum())
    variance = squares / (count - 1).clamp(min=1)
    whitened_t: Tensor = deviations_t * (variance + VARIANCE_EPSILON).rsqrt()
    return whitened_t.to(advantages_t.dtype)
