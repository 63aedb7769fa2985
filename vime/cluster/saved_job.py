"""The job of --load-debug-rollout-data: a trainer that learns from rollouts in files."""

from __future__ import annotations

import dataclasses

from vime.cluster.placement import Placement
from vime.cluster.record import Record
from vime.cluster.session import Slots
from vime.cluster.train_group import TrainGroup
from vime.cluster.training_job import TrainerJob, split
from vime.cluster.turns import Turns
from vime.config import Config
from vime.loop import Schedule
from vime.rollout.saved import NoPrompts, SavedRollouts


class SavedJob(TrainerJob):
    """Trains on what an earlier run sampled."""

    def __init__(self, config: Config, rollouts: SavedRollouts, record: Record, slots: Slots) -> None:
        trainer = TrainGroup(
            config,
            Placement(config, slots).rank,
            slots.threads,
            lambda batch, dp_size: split(batch, dp_size, config),
        )
        turns = Turns(trainer, trainer_leaves=False, engines_sleep=False)
        super().__init__(config, NoPrompts(), rollouts.num_rollout(config), record, trainer, turns)
        self.rollouts = rollouts

    def _make_schedule(self) -> Schedule:
        return dataclasses.replace(super()._make_schedule(), eval_interval=None, evaluates_first=False)
