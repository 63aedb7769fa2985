"""Estimators of KL(π ‖ π_ref) from sampled tokens (--kl-loss-type).

With ``d = log π - log π_ref``, after http://joschu.net/blog/kl-approx.html:

    k1          d                       unbiased, may be negative
    k2          d² / 2                  biased, never negative
    k3          exp(-d) - 1 + d         unbiased, never negative
    low_var_kl  k3 clipped to ±10       k3 that one token cannot take over
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vime.algorithms.ratio import log_ratio

__all__ = ["KINDS", "KL", "kl"]

LOW_VAR_LIMIT = 10.0


def _k1(log_ratio_t: Tensor) -> Tensor:
    return log_ratio_t


def _k2(log_ratio_t: Tensor) -> Tensor:
    return log_ratio_t.square() / 2


def _k3(log_ratio_t: Tensor) -> Tensor:
    return torch.expm1(-log_ratio_t) + log_ratio_t


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3, "low_var_kl": _k3}

KINDS = tuple(_ESTIMATORS)
"""The names that ``kl`` knows."""


class KL(NamedTuple):
    """An estimate of each token and where its log-ratio left the range of ±20."""

    values_t: Tensor  # float [t], with gradient
    clamped_t: Tensor  # bool [t]


def kl(log_probs_t: Tensor, ref_log_probs_t: Tensor, kind: str, *, old_log_probs_t: Tensor | None = None) -> KL:
    """The KL estimate of each token, float [t].

    Args:
        log_probs_t: of the policy, with gradient.
        ref_log_probs_t: of the reference model.
        kind: one of ``KINDS``.
        old_log_probs_t: of the policy that the tokens count as sampled from. When given, each estimate is multiplied by
            ``π / π_old`` before low_var_kl clips, which makes value and gradient unbiased after the policy has moved
            (--use-unbiased-kl; https://arxiv.org/abs/2512.02556, section 3.1). The ratio carries gradient.

    Raises:
        ValueError: the kind is unknown; the message lists those there are.
    """
    if kind not in _ESTIMATORS:
        raise ValueError(f"unknown KL estimator {kind!r}, known are: {', '.join(KINDS)}")
    ratio = log_ratio(log_probs_t, ref_log_probs_t)
    values_t, clamped_t = _ESTIMATORS[kind](ratio.values_t), ratio.clamped_t
    if old_log_probs_t is not None:
        moved = log_ratio(log_probs_t, old_log_probs_t)
        values_t, clamped_t = values_t * moved.values_t.exp(), clamped_t | moved.clamped_t
    if kind == "low_var_kl":
        values_t = values_t.clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT)
    return KL(values_t, clamped_t)
