"""Who has the devices: under --colocate on GPUs, trainer and engines take turns.

The order of a rollout: the engines generate; they sleep, and the trainer comes back and learns; its weights go to
shared host memory, and it leaves; the engines take memory for weights and load them, then memory for keys and values.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from vime.cluster.train_group import TrainGroup
from vime.rollout.tasks import together
from vime.serving.control import EngineControl
from vime.types import RolloutBatch, TrainResult

TIMEOUT_S = 300.0


class Turns:
    """Implements ``ports.Trainer``: the trainer, with the devices to itself for as long as it computes.

    Args:
        trainer_leaves: the trainer goes to host memory while engines generate.
        engines_sleep: the engines give their device memory up while the trainer computes.
    """

    def __init__(self, trainer: TrainGroup, *, trainer_leaves: bool, engines_sleep: bool) -> None:
        self._trainer = trainer
        self._trainer_leaves, self.engines_sleep = trainer_leaves, engines_sleep
        self._engines: Sequence[EngineControl] = ()
        self._asleep = False

    async def engines_started(self, engines: Sequence[EngineControl]) -> None:
        """They have dummy or old weights, and hand the devices over to the trainer, which starts next."""
        self._engines = engines
        await self._sleep(2)

    async def train(self, batch: RolloutBatch) -> TrainResult:
        """Afterwards the engines have no weights until the next sync."""
        await self._sleep(2)
        await self._come()
        return await self._trainer.train(batch)

    async def save(self, directory: Path) -> None:
        async with self._visit():
            await self._trainer.save(directory)

    async def save_hf(self, directory: Path) -> None:
        async with self._visit():
            await self._trainer.save_hf(directory)

    async def to_weights(self) -> None:
        """The trainer's weights are in shared memory: it leaves, and the engines make room for theirs."""
        await self._leave()
        if self._asleep:
            await self._all(lambda engine: engine.wake_up("weights", timeout_s=TIMEOUT_S))

    async def to_generation(self) -> None:
        """The engines have their weights, and take memory for keys and values."""
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
    async def _visit(self) -> AsyncIterator[None]:
        """The trainer has the devices between two rollouts, and the engines keep their weights."""
        await self._sleep(1)
        await self._come()
        yield
        await self._leave()
        if self._asleep:
            await self._all(lambda engine: engine.wake_up(timeout_s=TIMEOUT_S))
            self._asleep = False

    async def _sleep(self, level: int) -> None:
        if self.engines_sleep and not self._asleep:
            await self._all(lambda engine: engine.sleep(2 if level == 2 else 1, timeout_s=TIMEOUT_S))
            self._asleep = True

    async def _come(self) -> None:
        if self._trainer_leaves:
            await self._trainer.onload("parameters")
            await self._trainer.onload("rest")

    async def _leave(self) -> None:
        if self._trainer_leaves:
            await self._trainer.offload("rest")
            await self._trainer.offload("parameters")

    async def _all(self, call: Callable[[EngineControl], Coroutine[Any, Any, None]]) -> None:
        await together([call(engine) for engine in self._engines])
