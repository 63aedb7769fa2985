"""Policy losses, per token and not reduced: clipped by token (PPO), clipped by sequence (GSPO), weighted (CISPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vime.algorithms.ratio import log_ratio, sequence_log_ratio

__all__ = [
    "ClipRange",
    "PolicyLoss",
    "clipped_surrogate",
    "policy_loss",
    "sequence_policy_loss",
    "weighted_policy_loss",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRange:
    """How far the ratio may move before a token stops to count.

    Raises:
        ValueError: ``dual`` is not above 1.
    """

    low: float = 0.2  # --eps-clip: the ratio counts down to 1 - low
    high: float = 0.2  # --eps-clip-high: and up to 1 + high
    dual: float | None = None  # --eps-clip-c: for negative advantages the loss is at most -dual · A

    def __post_init__(self) -> None:
        if self.dual is not None and self.dual <= 1:
            raise ValueError(f"the dual clip must be above 1, not {self.dual}")


class PolicyLoss(NamedTuple):
    """The loss of each token and what happened to it."""

    loss_t: Tensor  # float [t], with gradient
    clipped_t: Tensor  # bool [t]: the clip, or the dual clip, decided the loss
    clamped_t: Tensor  # bool [t]: the log-ratio left the range of ±20


def policy_loss(
    log_probs_t: Tensor,
    old_log_probs_t: Tensor,
    advantages_t: Tensor,
    clip: ClipRange,
) -> PolicyLoss:
    """``clipped_surrogate`` with a ratio for each token, ``π / π_old``.

    Args:
        log_probs_t: float [t] of the policy, with gradient.
        old_log_probs_t: float [t] of the policy before the update.
        advantages_t: float [t].
        clip: the range of the ratio.
    """
    ratio = log_ratio(log_probs_t, old_log_probs_t)
    loss_t, clipped_t = clipped_surrogate(ratio.values_t, advantages_t, clip)
    return PolicyLoss(loss_t, clipped_t, ratio.clamped_t)


def sequence_policy_loss(
    log_probs_t: Tensor,
    old_log_probs_t: Tensor,
    advantages_t: Tensor,
    mask_t: Tensor,
    lengths_n: Tensor,
    clip: ClipRange,
) -> PolicyLoss:
    """``clipped_surrogate`` with one ratio for all tokens of a sample: the geometric mean of those of trained tokens.

    GSPO, https://arxiv.org/abs/2507.18071, equations 5 and 7. The gradient of a token's loss reaches every trained
    token of its sample.

    Args:
        log_probs_t: float [t] of the policy, with gradient.
        old_log_probs_t: float [t] of the policy before the update.
        advantages_t: float [t].
        mask_t: bool or 0/1 [t], the tokens that are trained.
        lengths_n: int64 [n], the tokens of each sample; they sum to t.
        clip: the range of the ratio.
    """
    ratio = sequence_log_ratio(log_probs_t, old_log_probs_t, mask_t, lengths_n)
    loss_t, clipped_t = clipped_surrogate(ratio.values_t, advantages_t, clip)
    return PolicyLoss(loss_t, clipped_t, ratio.clamped_t)


def weighted_policy_loss(
    log_probs_t: Tensor, old_log_probs_t: Tensor, advantages_t: Tensor, clip: ClipRange
) -> PolicyLoss:
    """``-sg(clip(ρ, 1 - low, 1 + high)) A log π``: the clipped ratio only weighs, so no token loses its gradient.

    CISPO, https://arxiv.org/abs/2506.13585, equations 4 and 5. The dual clip has no meaning here: ``clip.high`` bounds
    what a token weighs, whatever its advantage.

    Args:
        log_probs_t: float [t] of the policy, with gradient.
        old_log_probs_t: float [t] of the policy before the update.
        advantages_t: float [t].
        clip: the range of the ratio.

    Returns:
        ``clipped_t`` says where the weight is not the ratio itself.
    """
    ratio = log_ratio(log_probs_t.detach(), old_log_probs_t)
    ratio_t = ratio.values_t.exp()
    weights_t = ratio_t.clamp(1 - clip.low, 1 + clip.high)
    return PolicyLoss(-weights_t * advantages_t * log_probs_t, weights_t != ratio_t, ratio.clamped_t)


def clipped_surrogate(log_ratio_t: Tensor, advantages_t: Tensor, clip: ClipRange) -> tuple[Tensor, Tensor]:
    """``max(-ρ A, -clip(ρ, 1 - low, 1 + high) A)``, and for A < 0 no more than ``-dual · A``.

    https://arxiv.org/abs/1707.06347, equation 7, negated; two sides of the range after DAPO
    (https://arxiv.org/abs/2503.14476, section 3.1); dual clip after https://arxiv.org/abs/1912.09729.

    Args:
        log_ratio_t: ``log ρ``, float [t] with gradient, small enough for its exponential to be finite.
        advantages_t: float [t].
        clip: the range of the ratio.

    Returns:
        The loss, float [t], and where a clip decided it, bool [t].
    """
    assert log_ratio_t.shape == advantages_t.shape, (log_ratio_t.shape, advantages_t.shape)
    ratio_t = log_ratio_t.exp()
    free_t = -ratio_t * advantages_t
    held_t = -ratio_t.clamp(1 - clip.low, 1 + clip.high) * advantages_t
    loss_t, clipped_t = torch.maximum(free_t, held_t), held_t > free_t
    if clip.dual is None:
        return loss_t, clipped_t
    ceiling_t = -clip.dual * advantages_t
    capped_t = (advantages_t < 0) & (loss_t > ceiling_t)
    return torch.where(capped_t, ceiling_t, loss_t), clipped_t | capped_t
