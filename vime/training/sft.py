"""Supervised fine-tuning: the actor learns given dialogues instead of its own answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vime.algorithms import reduce
from vime.algorithms.sft import sft_loss
from vime.training.forward import run_schedule
from vime.training.loss import Given, Partial, not_finite
from vime.training.model import answer_of, run
from vime.training.model_worker import Clock
from vime.training.packing import MicroBatch
from vime.training.step import make_reduction, total
from vime.training.worker import TrainWorker
from vime.types import TrainBatch, TrainStep

__all__ = ["SftObjective", "SftWorker"]

TEMPERATURE = 1.0


@dataclass(frozen=True, slots=True)
class SftObjective:
    """Implements ``step.Objective``. Nothing has to be given."""

    per_token: bool

    def forward(self, chunk: Any, batch: MicroBatch) -> Tensor:
        return run(chunk, batch, TEMPERATURE)

    def loss(self, output: Tensor, batch: MicroBatch, given: Given, mean: reduce.Reduction) -> tuple[Tensor, Partial]:
        """This micro-batch's part of ``mean(-log π)``, and of the metrics."""
        answer = answer_of(output)
        losses_t = sft_loss(answer.log_probs_t)
        loss = mean(losses_t)
        sums = {"train/loss": loss.detach(), "train/entropy_loss": mean(answer.entropy_t).detach()}
        return loss, Partial(sums, {}, not_finite(losses_t.detach(), batch))


class SftWorker(TrainWorker):
    """A rank of the model that is fine-tuned."""

    def evaluate(self, batch: TrainBatch) -> dict[str, float]:
        """The metrics of ``SftObjective`` for given dialogues under the present weights; the same on every rank."""
        (packs,) = self._packs(batch)
        (step,) = batch.steps
        objective = self._own_objective()

        def forward(pack: MicroBatch, chunk: Any) -> tuple[Tensor, Any]:
            def partial(output: Tensor, non_loss_data: bool) -> Partial:
                mean = make_reduction(pack, step, per_token=objective.per_token)
                return objective.loss(output, pack, _nothing(pack), mean)[1]

            return objective.forward(chunk, pack), partial

        with torch.no_grad():
            return total(run_schedule(self.chunks, packs, forward, forward_only=True, collect_non_loss_data=True))

    def _own_objective(self) -> SftObjective:
        return SftObjective(self.config.batch.calculate_per_token_loss)

    def _given(self, batch: TrainBatch, packs: Sequence[MicroBatch], clock: Clock) -> list[Given]:
        return [_nothing(pack) for pack in packs]

    def _reviewed(
        self, batch: TrainBatch, packs: Sequence[MicroBatch], given: Sequence[Given]
    ) -> tuple[Sequence[MicroBatch], Sequence[Given], Sequence[TrainStep]]:
        """Loss masks may still change; there are no log-probs and no advantages, as on a stage that is not the last."""
        return self._hooks.reviewed(batch, packs, given, last_stage=False)


def _nothing(pack: MicroBatch) -> Given:
    return Given(advantages_t=pack.rewards_n)  # nobody reads it
