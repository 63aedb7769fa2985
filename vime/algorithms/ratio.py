"""The ratio of two policies on sampled tokens, kept where its exponential is harmless."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["MAX_LOG_RATIO", "LogRatio", "log_ratio"]

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
