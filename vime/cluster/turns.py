"""Who has the devices: under --colocate on GPUs, trainer and engines take turns.

The order of a rollout: the engines generate; they sleep, and the trainer comes back and learns; its weights go to
shared host memory, and it leaves; the engines take memory for weights and load them, then memory for keys and values.
Under --colocate-critic the critic is one more that comes and leaves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from vime.cluster.train_group import TrainGroup
from vime.rollout.tasks import together
from vime.serving.control import EngineControl
from vime.types import RolloutBatch, TokenScores, TrainResult

TIMEOUT_S = 300.0


class Turns:
    """Implements ``ports.ScoringTrainer``: the trainer, with the devices to itself for as long as it computes.

    Args:
        trainer_leaves: the trainer goes to host memory while engines generate, or while a critic computes on its
            devices.
        engines_sleep: the engines give their device memory up while the trainer computes.
    """

    def __init__(self, trainer: TrainGroup, *, trainer_leaves: bool, engines_sleep: bool) -> None:
        self._trainer = trainer
        self._trainer_leaves, self.engines_sleep = trainer_leaves, engines_sleep
        self._engines: Sequence[EngineControl] = ()
        self._asleep = False
        self._here: TrainGroup | None = trainer
        self._trainer_stays = False

    def guest(self, model: TrainGroup) -> Guest:
        """Another model that takes turns on the same devices."""
        return Guest(self, model)

    async def engines_started(self, engines: Sequence[EngineControl]) -> None:
        """They have dummy or old weights, and hand the devices over to the trainer, which starts next."""
        self._engines = engines
        await self._sleep(2)

    async def score(self, batch: RolloutBatch) -> dict[int, TokenScores]:
        await self.come(self._trainer)
        return await self._trainer.score(batch)

    async def train(self, batch: RolloutBatch) -> TrainResult:
        """Afterwards the engines have no weights until the next sync."""
        await self.come(self._trainer)
        return await self._trainer.train(batch)

    async def save(self, directory: Path) -> None:
        async with self.visit(self._trainer):
            await self._trainer.save(directory)

    async def save_hf(self, directory: Path) -> None:
        async with self.visit(self._trainer):
            await self._trainer.save_hf(directory)

    async def to_export(self) -> None:
        """The trainer is there with its weights, also after a rollout in which it had nothing to learn."""
        await self.come(self._trainer)

    async def to_weights(self, *, trainer_stays: bool = False) -> None:
        """The engines make room for weights; the trainer's are in shared memory by now, so it leaves before.

        Args:
            trainer_stays: its weights go straight from its devices to the engines', so it leaves afterwards.
        """
        self._trainer_stays = trainer_stays
        if not trainer_stays:
            await self._leave()
        if self._asleep:
            await self._all(lambda engine: engine.wake_up("weights", timeout_s=TIMEOUT_S))

    async def to_generation(self) -> None:
        """The engines have their weights, and take memory for keys and values."""
        if self._trainer_stays:
            await self._leave()
            self._trainer_stays = False
        if self._asleep:
            await self._all(lambda engine: engine.wake_up("kv_cache", timeout_s=TIMEOUT_S))
            self._asleep = False

    @asynccontextmanager
    async def comparing(self) -> AsyncIterator[None]:
        """The trainer has its parameters on the devices beside the engines, for a short pass."""
        if self._trainer_leaves:
            await self._trainer.onload("parameters")
        try:
            yield
        finally:
            if self._trainer_leaves:
                await self._trainer.offload("parameters")

    @asynccontextmanager
    async def visit(self, model: TrainGroup) -> AsyncIterator[None]:
        """The model has the devices between two rollouts, and the engines keep their weights."""
        await self._sleep(1)
        await self._enter(model)
        yield
        await self._leave()
        if self._asleep:
            await self._all(lambda engine: engine.wake_up(timeout_s=TIMEOUT_S))
            self._asleep = False

    async def come(self, model: TrainGroup) -> None:
        """The model has the devices to itself; engines that were there forget their weights."""
        await self._sleep(2)
        await self._enter(model)

    async def _sleep(self, level: int) -> None:
        if self.engines_sleep and not self._asleep:
            await self._all(lambda engine: engine.sleep(2 if level == 2 else 1, timeout_s=TIMEOUT_S))
            self._asleep = True

    async def _enter(self, model: TrainGroup) -> None:
        if self._trainer_leaves and self._here is not model:
            await self._leave()
            await model.onload("parameters")
            await model.onload("rest")
            self._here = model

    async def _leave(self) -> None:
        if self._here is not None:
            await self.dismiss(self._here)

    async def dismiss(self, model: TrainGroup) -> None:
        """The model leaves the devices, if models do that."""
        if self._trainer_leaves:
            await model.offload("rest")
            await model.offload("parameters")
            self._here = None if self._here is model else self._here

    async def _all(self, call: Callable[[EngineControl], Coroutine[Any, Any, None]]) -> None:
        await together([call(engine) for engine in self._engines])


class Guest:
    """Implements ``ports.ScoringTrainer``: a model which takes turns on a trainer's devices."""

    def __init__(self, turns: Turns, model: TrainGroup) -> None:
        self._turns, self._model = turns, model

    async def started(self) -> None:
        """It leaves, to make room for the trainer, which starts next."""
        await self._turns.dismiss(self._model)

    async def score(self, batch: RolloutBatch) -> dict[int, TokenScores]:
        await self._turns.come(self._model)
        return await self._model.score(batch)

    async def train(self, batch: RolloutBatch) -> TrainResult:
        await self._turns.come(self._model)
        return await self._model.train(batch)

    async def save(self, directory: Path) -> None:
        async with self._turns.visit(self._model):
            await self._model.save(directory)
