"""The job of supervised fine-tuning: a trainer, and nothing else."""

from __future__ import annotations

from vime.cluster.actors import SftActor
from vime.cluster.record import Record
from vime.cluster.session import Slots
from vime.cluster.training_job import TrainerJob, batch_options
from vime.config import Config
from vime.data.batching import make_eval_batches
from vime.rollout.sft import DialogueRollouts, Dialogues
from vime.types import RolloutBatch


class SftJob(TrainerJob):
    """Learns from dialogues as they are."""

    def __init__(self, config: Config, dialogues: Dialogues, record: Record, slots: Slots) -> None:
        super().__init__(config, dialogues.source, dialogues.num_rollout(config), record, slots, SftActor)
        self.rollouts = DialogueRollouts(
            dialogues, batch_size=config.rollout.rollout_batch_size, args=config.args, loss=self._loss
        )

    async def _loss(self, batch: RolloutBatch) -> float:
        options = batch_options(self._config)
        metrics = await self.trainer.evaluate(
            batch, lambda whole, dp_size: make_eval_batches(whole, dp_size=dp_size, **options)
        )
        return metrics["train/loss"]
