"""The objective of a critic for one micro-batch: its part of the loss of the whole step, and of every metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vime.algorithms import reduce
from vime.algorithms.value_loss import value_loss
from vime.training.loss import Partial
from vime.training.packing import MicroBatch
from vime.training.value_model import values_of_chunk

__all__ = ["Goal", "ValueObjective"]


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
        found = value_loss(output, given.old_values_t, given.returns_t, clip=self.clip)
        loss = mean(found.loss_t)
        sums = {
            "train/critic_loss": loss,
            "train/critic_clipfrac": mean(found.clipped_t),
            "rollout/values": mean(given.old_values_t),
            "rollout/returns": mean(given.returns_t),
        }
        return loss, Partial({name: value.detach() for name, value in sums.items()}, {})
