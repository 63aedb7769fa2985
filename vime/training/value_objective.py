"""The objective of a critic for one micro-batch: its part of the loss of the whole step, and of every metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vime.algorithms import reduce
from vime.algorithms.value_loss import value_loss
from vime.training.loss import Partial, not_finite, of_trained_tokens
from vime.training.packing import MicroBatch
from vime.training.value_model import values_of_chunk

__all__ = ["Goal", "ValueObjective", "with_explained_variance"]

_SHARE, _SQUARED_RETURNS, _SQUARED_ERRORS = "share", "squared returns", "squared errors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is known of the tokens of a micro-batch before its training pass, each float32 [T]."""

    old_values_t: Tensor  # of the critic before the update
    returns_t: Tensor  # what the values should be


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """Implements ``step.Objective`` for the critic."""

    clip: float  # --value-clip
    per_token: bool

    def forward(self, chunk: Any, batch: MicroBatch) -> Tensor:
        return values_of_chunk(chunk, batch)

    def loss(self, output: Tensor, batch: MicroBatch, given: Goal, mean: reduce.Reduction) -> tuple[Tensor, Partial]:
        given = of_trained_tokens(given, batch.mask_t)
        found = value_loss(output, given.old_values_t, given.returns_t, clip=self.clip)
        loss = mean(found.loss_t)
        sums = {
            "train/critic_loss": loss,
            "train/critic_clipfrac": mean(found.clipped_t),
            "rollout/values": mean(given.old_values_t),
            "rollout/returns": mean(given.returns_t),
            _SHARE: mean(torch.ones_like(given.returns_t)),  # below 1 where samples have nothing to train
            _SQUARED_RETURNS: mean(given.returns_t.square()),
            _SQUARED_ERRORS: mean((given.returns_t - given.old_values_t).square()),
        }
        parts = {name: value.detach() for name, value in sums.items()}
        return loss, Partial(parts, {}, not_finite(found.loss_t.detach(), batch))


def with_explained_variance(metrics: dict[str, float]) -> dict[str, float]:
    """``1 - Var(G - V) / Var(G)`` of a step in place of the means that it is made of: 1 of a perfect critic, 0 of one
    that knows the mean alone. Without it where the returns do not differ."""
    kept = dict(metrics)
    share, squared_returns, squared_errors = (kept.pop(name) for name in (_SHARE, _SQUARED_RETURNS, _SQUARED_ERRORS))
    if not share:
        return kept
    returns, values = kept["rollout/returns"] / share, kept["rollout/values"] / share
    variance = squared_returns / share - returns**2
    if variance > 1e-6 * squared_returns:
        kept["rollout/explained_variance"] = 1 - (squared_errors / share - (returns - values) ** 2) / variance
    return kept
