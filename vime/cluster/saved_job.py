"""The job of --load-debug-rollout-data: a trainer that learns from rollouts in files."""

from __future__ import annotations

import dataclasses

from vime.cluster.record import Record
from vime.cluster.session import Slots
from vime.cluster.training_job import TrainerJob
from vime.config import Config
from vime.loop import Schedule
from vime.rollout.saved import NoPrompts, SavedRollouts


class SavedJob(TrainerJob):
    """Trains on what an earlier run sampled."""

    def __init__(self, config: Config, rollouts: SavedRollouts, record: Record, slots: Slots) -> None:
        super().__init__(config, NoPrompts(), rollouts.num_rollout(config), record, slots)
        self.rollouts = rollouts

    def _make_schedule(self) -> Schedule:
        return dataclasses.replace(super()._make_schedule(), eval_interval=None, evaluates_first=False)
