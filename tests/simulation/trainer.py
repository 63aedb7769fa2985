"""A made-up trainer, its checkpoints, and the way of its weights into the engines.

Its weights are one number, which depends on all that it was ever trained on, in that order. So two runs that end with
the same weights have trained on the same samples, tokens and rewards.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.simulation.clock import TICK
from tests.simulation.engines import FakeClient, FakeEngine
from tests.simulation.scenario import Faults
from tests.simulation.world import History, Synced, Training, World, mixed
from vime.serving.http import EngineError
from vime.types import RolloutBatch, TrainResult, TrainSample, WeightVersion, derive_seed
from vime.weights.sync import sync_engines

SYNC_TIMEOUT_S = 30.0


class FakeTrainer:
    """Implements ``ports.Trainer``."""

    def __init__(self, world: World, weights: int, trainings: int) -> None:
        self._world = world
        self.weights = weights
        self.trainings = trainings

    async def train(self, batch: RolloutBatch) -> TrainResult:
        world = self._world
        world.tell("train", rollout=batch.rollout_id, samples=[sample.index for sample in batch.samples])
        world.history.trainings.append(Training(batch=batch, trainings=self.trainings, weights=self.weights))
        await asyncio.sleep(world.chance.seconds(0.5, 4, "training", batch.rollout_id))
        self.weights = mixed(self.weights, *map(lesson_of, batch.samples))
        self.trainings += 1
        world.tell("trained", rollout=batch.rollout_id, weights=self.weights)
        return TrainResult(steps=({"train/loss": 0.0},))


def lesson_of(sample: TrainSample) -> int:
    """A number for all of a sample that a trainer would learn from."""
    return derive_seed(
        sample.index, sample.group_index, repr(sample.tokens), repr(sample.loss_mask), repr(sample.rollout_log_probs),
        repr(sample.weight_versions), sample.raw_reward.hex(), sample.reward.hex(), sample.counts,
    )  # fmt: skip


class FakeSync:
    """Implements ``ports.WeightSync`` with the real order of steps."""

    def __init__(
        self, world: World, trainer: FakeTrainer, client: FakeClient, faults: Faults, version: WeightVersion
    ) -> None:
        self._world = world
        self._trainer = trainer
        self._client = client
        self._faults = faults
        self.version = version

    async def sync(self) -> WeightVersion:
        version, weights = self.version + 1, self._trainer.weights
        self._world.tell("sync", version=version, weights=weights)
        await sync_engines(self.transfer(weights), self._client.engines, version, timeout_s=SYNC_TIMEOUT_S)  # type: ignore[arg-type]
        assert weights == self._trainer.weights, "the trainer learned while its weights travelled"
        synced = Synced(weights=weights, trainings=self._trainer.trainings)
        if self._world.history.syncs.setdefault(version, synced) != synced:
            raise RuntimeError(f"version {version} is the name of two sets of weights")
        self.version = version
        self._world.tell("synced", version=version)
        return version

    def transfer(self, weights: int) -> FakeTransfer:
        return FakeTransfer(weights)


class FakeTransfer:
    """Implements ``weights.sync.Transfer``."""

    def __init__(self, weights: int) -> None:
        self._weights = weights

    async def announce(self, engines: Sequence[FakeEngine], version: WeightVersion, *, timeout_s: float) -> None:
        await asyncio.sleep(TICK)

    async def load(self, engines: Sequence[FakeEngine], *, timeout_s: float) -> Mapping[FakeEngine, EngineError]:
        loads = (engine.load(self._weights, timeout_s=timeout_s) for engine in engines)
        results = await asyncio.gather(*loads, return_exceptions=True)
        return {e: result for e, result in zip(engines, results, strict=True) if isinstance(result, EngineError)}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete one, and what of the history belongs to it."""

    rollout_id: int
    weights: int
    trainings: int
    state: str  # of the driver, as JSON
    history: History

    def driver_state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.state)
        return state


class FakeCheckpoints:
    """Implements ``ports.Checkpoints``: the trainer's part takes its time, then all of it is there at once."""

    def __init__(self, world: World, trainer: FakeTrainer, driver_state: Callable[[], dict[str, Any]]) -> None:
        self._world = world
        self._trainer = trainer
        self._driver_state = driver_state
        self.last: Checkpoint | None = None

    async def save(self, rollout_id: int) -> Path:
        self._world.tell("save", rollout=rollout_id)
        await asyncio.sleep(self._world.chance.seconds(0.1, 2, "saving", rollout_id))
        self.last = Checkpoint(
            rollout_id=rollout_id,
            weights=self._trainer.weights,
            trainings=self._trainer.trainings,
            state=json.dumps(self._driver_state(), allow_nan=False),
            history=self._world.history.copy(),
        )
        self._world.tell("saved", rollout=rollout_id)
        return Path(f"iter_{rollout_id:07d}")
