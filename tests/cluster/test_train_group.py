"""Shares of a batch reach the ranks of a model through Ray's object store: once a node, and not longer than needed.

Ray and its two nodes are real; the ranks only read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import ray
from ray._private.internal_api import memory_summary
from ray.cluster_utils import Cluster

from vime.cluster.actors import ModelActor
from vime.cluster.critic import without_routes
from vime.cluster.train_group import TrainGroup
from vime.training.records import StartInfo
from vime.types import RolloutBatch, TrainBatch, TrainSample

RANKS, NODES, REPLICAS = 4, 2, 2
STORE_BYTES = 100 << 20
ROUTES = (20_000, 48, 32)  # 31 MB: those of all ranks would not fit into a store


@dataclass(frozen=True)
class Placed:
    """As much of a configuration as ranks that only read need."""

    train_world_size: int = RANKS
    train_env_vars: Mapping[str, Any] = field(default_factory=dict)
    tensor_model_parallel_size: int = 1

    @property
    def cluster(self) -> Placed:
        return self

    parallel = cluster


class Reader(ModelActor):
    """A rank that tells what it got."""

    name = "reader"

    def _worker_class(self) -> Any:
        raise AssertionError("it has none")

    def start(self, master_addr: str, master_port: int) -> StartInfo:
        return StartInfo(
            start_rollout_id=0,
            dp_size=REPLICAS,
            dp_rank=self._rank % REPLICAS,
            is_reporter=self._rank == 0,
            dtype="float32",
            resumed_from=None,
            state=None,
        )

    def score(self, batch: TrainBatch) -> Any:
        (sample,) = batch.samples
        routes = cast("np.ndarray[Any, Any]", sample.routed_experts)
        return {self._rank: (ray.get_runtime_context().get_node_id(), int(routes[-1, -1, -1]), routes.flags.owndata)}


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    """The names of two nodes, each with a store of its own."""
    cluster = Cluster()
    try:
        for name in ("one", "two"):
            cluster.add_node(num_cpus=1, resources={name: RANKS}, object_store_memory=STORE_BYTES)
        ray.init(cluster.address, log_to_driver=False)
        yield ["one", "two"]
    finally:
        ray.shutdown()
        cluster.shutdown()


def share(replica: int) -> TrainBatch:
    return TrainBatch(rollout_id=0, samples=(sample(replica, np.full(ROUTES, 7 + replica, np.uint8)),), steps=())


def sample(index: int, routes: np.ndarray[Any, Any] | None) -> TrainSample:
    return TrainSample(
        index=index,
        group_index=0,
        tokens=(1, 2),
        response_length=1,
        loss_mask=(1,),
        rollout_log_probs=None,
        weight_versions=(),
        raw_reward=0.0,
        reward=0.0,
        routed_experts=routes,
    )


async def test_each_node_has_a_share_once_and_only_for_the_call(nodes: list[str]) -> None:
    """A third of what ranks with copies of their own would take fits into a store; three rollouts would not."""
    group = TrainGroup(
        cast(Any, Placed()),
        lambda rank: {"num_cpus": 0, "resources": {nodes[rank // REPLICAS]: 1}},
        1,
        lambda batch, replicas: [share(replica) for replica in range(replicas)],
        Reader,
    )
    await group.start()
    for _ in range(3):
        told: dict[int, Any] = await group.score(RolloutBatch(rollout_id=0, samples=()))
        assert len({node for node, _, _ in told.values()}) == NODES
        assert {rank: routes for rank, (_, routes, _) in told.items()} == {0: 7, 1: 8, 2: 7, 3: 8}
        assert not any(owns for _, _, owns in told.values())  # ranks of a node read the same memory
        wait_until_free()
    assert "Spilled" not in memory_summary(stats_only=True)


def wait_until_free(timeout_s: float = 20.0) -> None:
    """Until no store of the cluster has an object any more."""
    end = time.monotonic() + timeout_s
    while "Plasma memory usage 0 MiB, 0 objects" not in (said := memory_summary(stats_only=True)):
        assert time.monotonic() < end, said
        time.sleep(0.1)


def test_a_critic_gets_no_routes() -> None:
    batch = RolloutBatch(rollout_id=3, samples=(sample(0, np.zeros((1, 2, 2), np.uint8)), sample(1, None)))
    assert without_routes(batch) == RolloutBatch(rollout_id=3, samples=(sample(0, None), sample(1, None)))
    assert batch.samples[0].routed_experts is not None
