"""Which slot each process gets: one placement group for the whole run, so that it starts as a whole or not at all."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vime.cluster.session import Slots
from vime.config import Config
from vime.errors import UserError

TIMEOUT_S = 60.0
SHARE = 0.5
"""Of a slot, for each of trainer and engine where they take turns on it."""


class Placement:
    """The slots of a run. The trainer's ranks have the first ones, engines the next; or under --colocate the same."""

    def __init__(self, config: Config, slots: Slots) -> None:
        cluster = config.cluster
        self._slots = slots
        self._share = SHARE if cluster.colocate else 1.0
        self._first_engine_slot = 0 if cluster.colocate else cluster.train_world_size
        self._slots_of_an_engine = cluster.rollout_num_gpus_per_engine
        count = cluster.train_world_size + (0 if cluster.colocate else cluster.rollout_num_gpus)
        self._group = placement_group([{slots.kind: 1.0}] * count, strategy="PACK")
        if not self._group.wait(TIMEOUT_S):
            free = ray.available_resources().get(slots.kind, 0)
            raise UserError(f"this run needs {count} {slots.kind} slots at once, {free:g} of {slots.total} are free")

    def rank(self, rank: int) -> dict[str, Any]:
        """Options for the actor of a training rank."""
        return self._options(rank)

    def engine(self, index: int) -> dict[str, Any]:
        """Options for the actor of an engine."""
        return self._options(self._first_engine_slot + index * self._slots_of_an_engine)

    def _options(self, bundle: int) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        amounts = {"num_gpus": self._share, "num_cpus": 0} if self._slots.kind == "GPU" else {"num_cpus": self._share}
        return {"scheduling_strategy": strategy, **amounts}
