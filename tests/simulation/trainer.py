"""A made-up trainer and its checkpoints.

Its weights are one number, which depends on all that it was ever trained on, in that order. So two runs that end with
the same weights have trained on the same samples, tokens and rewards.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.simulation.broadcast import FakeGroup
from tests.simulation.clock import TICK
from tests.simulation.engines import log_prob, prefix_of
from tests.simulation.world import History, Synced, Training, World, mixed
from vime.cluster.turns import Turns
from vime.types import RolloutBatch, TokenScores, TrainResult, TrainSample, WeightVersion, derive_seed
from vime.weights.invitation import Invitation, SendReport
from vime.weights.plan import WeightPlan

MEMORY_GIB = {"parameters": 4, "rest": 8}
SHARED = "/dev/shm/weights"
PLAN = WeightPlan.of([("weights", (1,), "float32")])


@dataclass(frozen=True, kw_only=True)
class FakeExport:
    """Implements ``weights.transfers.Export``."""

    plan: WeightPlan = PLAN
    path: str = SHARED
    handles: Mapping[str, str] = field(default_factory=dict)


class FakeTrainer:
    """Stands for a ``TrainGroup``: the ranks of the actor."""

    def __init__(self, world: World, weights: int, trainings: int) -> None:
        self._world = world
        self.weights = weights
        self.trainings = trainings

    async def prepare_to_leave(self) -> None: ...

    async def shed(self) -> list[int]:
        return await self.free_bytes()

    async def begin_offload(self, part: str) -> None: ...

    async def onload(self, part: str) -> None:
        self._world.devices.take_all(part, MEMORY_GIB[part])
        await asyncio.sleep(8 * TICK)

    async def offload(self, part: str) -> None:
        await asyncio.sleep(8 * TICK)
        self._world.devices.free_all(part)

    async def free_bytes(self) -> list[int]:
        return self._world.devices.free_bytes()

    async def train(self, batch: RolloutBatch) -> TrainResult:
        world = self._world
        world.tell("train", rollout=batch.rollout_id, samples=[sample.index for sample in batch.samples])
        world.history.trainings.append(Training(batch=batch, trainings=self.trainings, weights=self.weights))
        await asyncio.sleep(world.chance.seconds(0.5, 4, "training", batch.rollout_id))
        self.weights = mixed(self.weights, *map(lesson_of, batch.samples))
        self.trainings += 1
        world.tell("trained", rollout=batch.rollout_id, weights=self.weights)
        return TrainResult(steps=({"train/loss": 0.0},))

    async def export_weights(self, version: WeightVersion, *, on_device: bool) -> FakeExport:
        """Overwrites what engines could read so far."""
        self._name(version)
        self._world.shared[SHARED] = self.weights
        return FakeExport()

    def _name(self, version: WeightVersion) -> None:
        self._world.tell("export", version=version, weights=self.weights)
        synced = Synced(weights=self.weights, trainings=self.trainings)
        if self._world.history.syncs.setdefault(version, synced) != synced:
            raise RuntimeError(f"version {version} is the name of two sets of weights")

    # ``weights.transfers.Broadcaster``

    async def weight_plan(self, version: WeightVersion) -> WeightPlan:
        self._name(version)
        return PLAN

    async def invite_engines(self, members: int, timeout_s: float) -> Invitation:
        if self._world.group is not None:
            self._world.group.close("the trainer has left")
        self._world.group = FakeGroup(members, timeout_s)
        return self._world.group.invitation

    async def join_engines(self) -> None:
        await self._group.meet()

    async def broadcast_weights(self, bucket_bytes: int) -> SendReport:
        report = await self._group.send(self.weights)
        self._world.tell("broadcast", weights=self.weights, failures=list(report.failures))
        return report

    @property
    def _group(self) -> FakeGroup:
        assert self._world.group is not None
        return self._world.group

    async def log_probs_of(self, token_ids: Sequence[int], prompt_length: int) -> list[float]:
        prefix, found = prefix_of(token_ids[:prompt_length]), []
        for token in token_ids[prompt_length:]:
            found.append(log_prob(prefix, token, self.weights))
            prefix = prefix_of([token], prefix)
        return found

    async def save(self, directory: Path) -> None:
        await asyncio.sleep(self._world.chance.seconds(0.1, 2, "saving", self.trainings))


class FakeCritic:
    """Implements ``ports.ScoringTrainer`` on devices of its own."""

    def __init__(self, world: World, weights: int) -> None:
        self._world = world
        self.weights = weights

    async def score(self, batch: RolloutBatch) -> dict[int, TokenScores]:
        await asyncio.sleep(self._world.chance.seconds(0.1, 1, "scoring", batch.rollout_id))
        return {sample.index: TokenScores(values=values_of(sample, self.weights)) for sample in batch.samples}

    async def train(self, batch: RolloutBatch) -> TrainResult:
        await asyncio.sleep(self._world.chance.seconds(0.5, 4, "training of the critic", batch.rollout_id))
        self.weights = mixed(self.weights, *map(lesson_of, batch.samples))
        return TrainResult(steps=({"train/value_loss": 0.0},))


def values_of(sample: TrainSample, weights: int) -> tuple[float, ...]:
    return tuple(mixed(weights, sample.index, place) % 64 / 64 for place in range(sample.response_length))


def lesson_of(sample: TrainSample) -> int:
    """A number for all of a sample that a trainer would learn from."""
    return derive_seed(
        sample.index, sample.group_index, repr(sample.tokens), repr(sample.loss_mask), repr(sample.rollout_log_probs),
        repr(sample.weight_versions), sample.raw_reward.hex(), sample.reward.hex(), sample.counts, repr(sample.scores),
    )  # fmt: skip


class FakeLedger:
    """Stands for a ``MemoryLedger``."""

    def training(self) -> None: ...

    def generating(self, settled: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete one, and what of the history belongs to it."""

    rollout_id: int
    weights: int
    critic_weights: int
    trainings: int
    state: str  # of the driver, as JSON
    history: History

    def driver_state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.state)
        return state


class FakeCheckpoints:
    """Implements ``ports.Checkpoints``: the trainer's part takes its time, then all of it is there at once."""

    def __init__(
        self,
        world: World,
        trainer: FakeTrainer,
        critic: FakeCritic,
        turns: Turns,
        driver_state: Callable[[], dict[str, Any]],
    ) -> None:
        self._world = world
        self._trainer = trainer
        self._critic = critic
        self._turns = turns
        self._driver_state = driver_state
        self.last: Checkpoint | None = None

    async def save(self, rollout_id: int) -> Path:
        self._world.tell("save", rollout=rollout_id)
        folder = Path(f"iter_{rollout_id:07d}")
        await self._turns.save(folder)
        self.last = Checkpoint(
            rollout_id=rollout_id,
            weights=self._trainer.weights,
            critic_weights=self._critic.weights,
            trainings=self._trainer.trainings,
            state=json.dumps(self._driver_state(), allow_nan=False),
            history=self._world.history.copy(),
        )
        self._world.tell("saved", rollout=rollout_id)
        return folder
