"""Which slots each process gets: one placement group for the whole run, so that it starts as a whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vime.cluster.calls import get_all
from vime.cluster.session import Slots
from vime.config import Config
from vime.errors import UserError

TIMEOUT_S = 60.0
SHARES = {1: 1.0, 2: 0.5, 3: 0.33}
"""Of a slot, for each of those that take turns on it: actor, critic and engine."""


class Placement:
    """The slots of a run: the actor's ranks have the first ones, the critic's the next, then come engines.

    Under --colocate engines have the actor's, and so has the critic under --colocate-critic.

    Training ranks have one each, counted along the nodes and their devices, so that neighbours lie together. An engine
    has all of its own on one node; under --colocate those of consecutive ranks.
    """

    def __init__(self, config: Config, slots: Slots) -> None:
        cluster = config.cluster
        self._kind = slots.kind
        self._colocate = cluster.colocate
        self._share = SHARES[1 + cluster.colocate + cluster.colocate_critic]
        self._first_critic_rank = 0 if cluster.colocate_critic else cluster.train_world_size
        self._ranks = cluster.train_slots
        self._slots_of_an_engine = cluster.rollout_num_gpus_per_engine
        engines = cluster.num_engines
        check_engines_fit(engines, self._slots_of_an_engine, _slots_of_nodes(slots.kind), slots.kind)
        bundles = [1] * self._ranks + ([] if self._colocate else [self._slots_of_an_engine] * engines)
        self._group = placement_group([{slots.kind: float(size)} for size in bundles], strategy="PACK")
        if not self._group.wait(TIMEOUT_S):
            free = ray.available_resources().get(slots.kind, 0)
            needed = sum(bundles)
            raise UserError(f"this run needs {needed} {slots.kind} slots at once, {free:g} of {slots.total} are free")
        self._nodes: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        self._order = self._along_the_devices()
        if self._colocate:
            self._check_colocated(engines)

    def rank(self, rank: int) -> dict[str, Any]:
        """Options for the Ray actor of a rank of the actor."""
        return self._in_bundle(self._order[rank][0], self._share)

    def critic_rank(self, rank: int) -> dict[str, Any]:
        """Options for the Ray actor of a rank of the critic."""
        return self.rank(self._first_critic_rank + rank)

    def engine(self, index: int) -> dict[str, Any]:
        """Options for the actor of an engine."""
        if self._colocate:
            return self.rank(self._shared_ranks(index)[0])
        return self._in_bundle(self._ranks + index, float(self._slots_of_an_engine))

    def devices(self, index: int) -> tuple[str, ...]:
        """The GPUs that an engine shares with training ranks, as its node names them; Ray shows it only the first.

        Empty where slots are CPU processes, and where an engine has slots of its own, which Ray shows it.
        """
        if not self._colocate:
            return ()
        return tuple(device for _, device in (self._order[rank] for rank in self._shared_ranks(index)) if device)

    def node_of_rank(self, rank: int) -> str:
        """Ray's id of the node."""
        return self._nodes[self._order[rank][0]]

    def node_of_engine(self, index: int) -> str:
        if self._colocate:
            return self.node_of_rank(self._shared_ranks(index)[0])
        return self._nodes[self._ranks + index]

    def _shared_ranks(self, engine: int) -> range:
        first = engine * self._slots_of_an_engine
        return range(first, first + self._slots_of_an_engine)

    def _along_the_devices(self) -> list[tuple[int, str]]:
        """The bundles of training ranks with their GPUs, by node and number of the GPU."""
        bundles = range(self._ranks)
        if self._kind != "GPU":
            return [(bundle, "") for bundle in sorted(bundles, key=lambda each: (self._nodes[each], each))]
        device_of = ray.remote(_device)
        probes = [device_of.options(**self._in_bundle(bundle, self._share)).remote() for bundle in bundles]
        devices = get_all(probes, what="asking for the GPUs of the training ranks", timeout_s=TIMEOUT_S)
        return along_the_devices(
            [(self._nodes[bundle], device) for bundle, device in zip(bundles, devices, strict=True)]
        )

    def _check_colocated(self, engines: int) -> None:
        for engine in range(engines):
            nodes = {self.node_of_rank(rank) for rank in self._shared_ranks(engine)}
            if len(nodes) > 1:
                raise UserError(
                    f"--rollout-num-gpus-per-engine {self._slots_of_an_engine}: under --colocate the slots of engine "
                    f"{engine} would lie on {len(nodes)} nodes, and an engine runs on one"
                )

    def _in_bundle(self, bundle: int, amount: float) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        amounts = {"num_gpus": amount, "num_cpus": 0} if self._kind == "GPU" else {"num_cpus": amount}
        return {"scheduling_strategy": strategy, **amounts}


def along_the_devices(places: Sequence[tuple[str, str]]) -> list[tuple[int, str]]:
    """Bundles with their GPUs, by node and number of the GPU; behind numbers, by name.

    Args:
        places: of each bundle Ray's id of the node, and the GPU as CUDA_VISIBLE_DEVICES named it to Ray: a number, or
            an id (``GPU-...``, ``MIG-...``), which does not tell who is whose neighbour.
    """

    def key(bundle: int) -> tuple[str, bool, int, str]:
        node, device = places[bundle]
        number = int(device) if device.isdecimal() else None
        return node, number is None, number or 0, device

    return [(bundle, places[bundle][1]) for bundle in sorted(range(len(places)), key=key)]


def check_engines_fit(engines: int, each: int, nodes: Sequence[int], kind: str) -> None:
    """Raises UserError if nodes with so many slots have no room for the engines, each of which runs on one node."""
    room = sum(slots // each for slots in nodes)
    if room < engines:
        raise UserError(
            f"--rollout-num-gpus-per-engine {each}: an engine runs on one node, and the nodes of this cluster "
            f"({', '.join(map(str, nodes))} {kind} slots) have room for {room} of {engines} engines"
        )


def _slots_of_nodes(kind: str) -> list[int]:
    return [int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]]


def _device() -> str:
    """The GPU of the slot on which this runs."""
    return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])
