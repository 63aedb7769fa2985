"""The clipped loss of PPO's critic, per token and not reduced."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ValueLoss", "value_loss"]


class ValueLoss(NamedTuple):
    """The loss of each token and what happened to it."""

    loss_t: Tensor  # float [t], with gradient
    clipped_t: Tensor  # bool [t]: the clip decided the loss


def value_loss(values_t: Tensor, old_values_t: Tensor, returns_t: Tensor, *, clip: float) -> ValueLoss:
    """``max((V - G)², (V_old + clip(V - V_old, ±clip) - G)²)``, without a factor of one half.

    The clip of the value function in PPO's reference implementation, described in detail 9 of "The 37 implementation
    details of PPO" (https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/).

    Args:
        values_t: float [t] of the critic, with gradient.
        old_values_t: float [t] of the critic before the update.
        returns_t: float [t], what the values should be.
        clip: how far from the old value a value may move before a token stops to count.
    """
    assert values_t.shape == old_values_t.shape == returns_t.shape, (values_t.shape, old_values_t.shape)
    free_t = (values_t - returns_t).square()
    held_t = (old_values_t + (values_t - old_values_t).clamp(-clip, clip) - returns_t).square()
    return ValueLoss(torch.maximum(free_t, held_t), held_t > free_t)
