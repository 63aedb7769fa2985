"""The ratio of two policies on sampled tokens, kept where its exponential is harmless."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from vime.algorithms.reduce import segment_mean

__all__ = ["MAX_LOG_RATIO", "LogRatio", "log_ratio", "sequence_log_ratio"]

MAX_LOG_RATIO = 20.0
"""exp(20) is 4.9e8. A ratio that large says that something is wrong with the log-probs, not how to move the weights;
and one infinite ratio with a negative advantage would make the loss infinite."""


class LogRatio(NamedTuple):
    """A clamped log-ratio and where it was clamped."""

    values_t: Tensor  # float [t], within ±20; no gradient where clamped
    clamped_t: Tensor  # bool [t]


def log_ratio(log_probs_t: Tensor, other_log_probs_t: Tensor) -> LogRatio:
    """``log π - log π'`` of each token [t], clamped to ±20. NaN stays NaN, so that it is seen."""
    assert log_probs_t.shape == other_log_probs_t.shape, (log_probs_t.shape, other_log_probs_t.shape)
    difference_t = log_probs_t - other_log_probs_t
    return LogRatio(difference_t.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), difference_t.detach().abs() > MAX_LOG_RATIO)


def sequence_log_ratio(
    log_probs_t: Tensor, other_log_probs_t: Tensor, mask_t: Tensor, lengths_n: Tensor, *, total: bool = False
) -> LogRatio:
    """``Σ_t m (log π - log π')`` of each sample over ``max(Σ_t m, 1)``, at each of its tokens [t], clamped to ±20.

    The mean is clamped, not its terms.

    Args:
        log_probs_t: float [t].
        other_log_probs_t: float [t].
        mask_t: bool or 0/1 [t]; what stands at masked tokens does not matter.
        lengths_n: int64 [n], the tokens of each sample; they sum to t.
        total: the sum itself, not divided.
    """
    assert log_probs_t.shape == other_log_probs_t.shape, (log_probs_t.shape, other_log_probs_t.shape)
    ratios_n = segment_mean(log_probs_t - other_log_probs_t, mask_t, lengths_n, total=total)
    ratios_t = ratios_n.repeat_interleave(lengths_n, output_size=log_probs_t.numel())
    return LogRatio(ratios_t.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), ratios_t.detach().abs() > MAX_LOG_RATIO)
