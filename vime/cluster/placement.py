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
SHARES = {1: 1.0, 2: 0.5, 3: 0.33}
"""Of a slot, for each of those that take turns on it: actor, critic and engine."""


class Placement:
    """The slots of a run. The actor's ranks have the first ones, the critic's the next, then come engines.

    Under --colocate engines have the actor's, and so has the critic under --colocate-critic.

    Slots are counted along the nodes and their devices, so that those of one engine lie together.
    """

    def __init__(self, config: Config, slots: Slots) -> None:
        cluster = config.cluster
        self._slots = slots
        self._share = SHARES[1 + cluster.colocate + cluster.colocate_critic]
        self._first_critic_slot = 0 if cluster.colocate_critic else cluster.train_world_size
        self._first_engine_slot = 0 if cluster.colocate else cluster.train_slots
        self._slots_of_an_engine = cluster.rollout_num_gpus_per_engine
        count = cluster.num_slots
        self._group = placement_group([{slots.kind: 1.0}] * count, strategy="PACK")
        if not self._group.wait(TIMEOUT_S):
            free = ray.available_resources().get(slots.kind, 0)
            raise UserError(f"this run needs {count} {slots.kind} slots at once, {free:g} of {slots.total} are free")
        self._order = self._along_the_devices() if slots.kind == "GPU" else [(bundle, "") for bundle in range(count)]

    def rank(self, rank: int) -> dict[str, Any]:
        """Options for the Ray actor of a rank of the actor."""
        return self._options(rank)

    def critic_rank(self, rank: int) -> dict[str, Any]:
        """Options for the Ray actor of a rank of the critic."""
        return self._options(self._first_critic_slot + rank)

    def engine(self, index: int) -> dict[str, Any]:
        """Options for the actor of an engine, which stands on the first of its slots."""
        return self._options(self._slots_of(index)[0])

    def devices(self, index: int) -> tuple[str, ...]:
        """The GPUs of an engine's slots, as its node numbers them; empty where slots are CPU processes.

        Ray shows an actor only those of its own slot.
        """
        return tuple(device for _, device in (self._order[slot] for slot in self._slots_of(index)) if device)

    def _slots_of(self, engine: int) -> range:
        first = self._first_engine_slot + engine * self._slots_of_an_engine
        return range(first, first + self._slots_of_an_engine)

    def _along_the_devices(self) -> list[tuple[int, str]]:
        """Bundles of the placement group with their GPUs, by node and number of the GPU."""
        bundles = range(self._group.bundle_count)
        where = ray.remote(_where)
        probes = [where.options(**self._in_bundle(bundle)).remote() for bundle in bundles]
        places = ray.get(probes, timeout=TIMEOUT_S)
        ordered = sorted(zip(places, bundles, strict=True), key=lambda each: (each[0][0], int(each[0][1]), each[1]))
        return [(bundle, device) for (_, device), bundle in ordered]

    def _options(self, slot: int) -> dict[str, Any]:
        return self._in_bundle(self._order[slot][0])

    def _in_bundle(self, bundle: int) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        amounts = {"num_gpus": self._share, "num_cpus": 0} if self._slots.kind == "GPU" else {"num_cpus": self._share}
        return {"scheduling_strategy": strategy, **amounts}


def _where() -> tuple[str, str]:
    """The node and the GPU of the slot on which this runs."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()["GPU"][0]
