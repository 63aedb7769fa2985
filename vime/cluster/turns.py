"""Who has the devices: under --colocate on GPUs, trainer and engines take turns.

The order of a rollout: the engines generate; they sleep, and the trainer comes back and learns; its weights are copied
to where engines can read them, and it leaves; the engines take memory for weights and load them, then memory for keys
and values.
Under --colocate-critic the critic is one more that comes and leaves. An engine that is started in the place of one that
was lost takes memory while no model is on the devices, and no model comes until it has started.

Where a device has room for both, the trainer leaves while engines load weights and begin to generate: how much they
take is measured in the turns before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vime.serving.control import EngineControl
from vime.serving.fleet import Fleet
from vime.types import RolloutBatch, TokenScores, TrainResult

if TYPE_CHECKING:
    from vime.cluster.train_group import TrainGroup

TIMEOUT_S = 300.0
CLOSE_TIMEOUT_S = 30.0
MARGIN_BYTES = 4 << 30
"""What must be left on a device where trainer and engines meet, for what both need while they compute."""

REMEMBERED = 4
"""Turns after which what an engine took, or somebody else beside it, is forgotten."""

Tag = Literal["weights", "kv_cache"]
"""What engines take memory for, one after the other."""


class Turns:
    """Implements ``ports.ScoringTrainer``: the trainer, with the devices to itself for as long as it computes.

    Args:
        trainer_leaves: the trainer goes to host memory while engines generate, or while a critic computes on its
            devices.
        engines_sleep: the engines give their device memory up while the trainer computes.
        note: takes metrics of the rollout that is being made: the seconds of each turn.
    """

    def __init__(
        self,
        trainer: TrainGroup,
        *,
        trainer_leaves: bool,
        engines_sleep: bool,
        note: Callable[[Mapping[str, float]], None] = lambda metrics: None,
    ) -> None:
        self._trainer = trainer
        self.trainer_leaves, self.engines_sleep = trainer_leaves, engines_sleep
        self.trained = 0  # how often, since this was last set to 0
        self._fleet = Fleet()
        self._sleeping: set[EngineControl] = set()
        self._asleep = False  # the devices are not the engines'
        self._here: TrainGroup | None = trainer
        self._copied = False  # the weights lie on the devices once more, for engines that load them
        self._note = note
        self._taken: dict[Tag, deque[list[int]]] = {}  # bytes of each rank's device that engines took of late
        self._leaving: asyncio.Task[None] | None = None  # of the trainer, beside engines that generate
        self._turn = asyncio.Lock()  # of whoever uses the models or moves them
        self._lent = False  # to engines that start, though no model has given up its turn
        self._starting = 0  # engines
        self._comparing = False
        self._moved = asyncio.Condition()  # notified when one of these changes

    def guest(self, model: TrainGroup) -> Guest:
        """Another model that takes turns on the same devices."""
        return Guest(self, model)

    async def engines_started(self, fleet: Fleet) -> None:
        """They have dummy or old weights, and hand the devices over to the trainer, which starts next."""
        self._fleet = fleet
        await self._sleep(2)

    async def trainer_started(self) -> None:
        """It is on the devices, and has not left them yet."""
        if self.trainer_leaves:
            await self._trainer.prepare_to_leave()

    async def close(self) -> None:
        """Waits for a trainer that is on its way out. What goes wrong there does not matter any more."""
        if self._leaving is not None:
            await asyncio.wait([self._leaving], timeout=CLOSE_TIMEOUT_S)
            if self._leaving.done() and not self._leaving.cancelled():
                self._leaving.exception()  # which is seen by that

    async def settled(self) -> None:
        """Waits until nobody is on the way out. What goes wrong there is raised before the next turn, not here."""
        if self._leaving is not None:
            await asyncio.wait([self._leaving])

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Nobody else uses models, or moves them or engines, within."""
        async with self._turn:
            yield

    async def score(self, batch: RolloutBatch) -> dict[int, TokenScores]:
        async with self.computing(self._trainer):
            return await self._trainer.score(batch)

    async def train(self, batch: RolloutBatch) -> TrainResult:
        """Afterwards the engines have no weights until the next sync."""
        async with self.computing(self._trainer):
            self.trained += 1
            return await self._trainer.train(batch)

    async def save(self, directory: Path) -> None:
        async with self.visit(self._trainer):
            await self._trainer.save(directory)

    async def save_hf(self, directory: Path) -> None:
        async with self.visit(self._trainer):
            await self._trainer.save_hf(directory)

    @asynccontextmanager
    async def computing(self, model: TrainGroup) -> AsyncIterator[None]:
        """The model has the devices to itself, and no weights are fetched from it."""
        async with self._turn:
            await self._come(model)
            yield

    @property
    def engines_are_asleep(self) -> bool:
        return self._asleep

    async def to_export(self) -> None:
        """The trainer is there with its weights, also after a rollout in which it had nothing to learn. To be called,
        as what follows, within ``turn``."""
        await self._come(self._trainer)
        if self.trainer_leaves:
            await self._trainer.shed()

    async def to_starts(self) -> None:
        """The devices are free for engines that start, until the next step."""
        await self._left()
        await self._clear()
        async with self._moved:
            self._lent = True
            self._moved.notify_all()

    async def to_weights(self, *, trainer_stays: bool = False, copied: bool = False) -> None:
        """The engines take memory for weights; the trainer's are where engines read them by now, so it leaves: before
        if there is no room for both, else afterwards.

        Args:
            trainer_stays: its weights go straight from its devices to the engines', so it leaves afterwards.
            copied: they lie on its devices once more, until the engines have loaded them.
        """
        self._copied = copied
        if trainer_stays:
            await self._wake("weights")
            return
        if self._here is not None and self.trainer_leaves:
            with self._timed("begin_to_leave"):
                await self._begin_to_leave(self._here)
        await self._wake("weights", make_room=self._leave)

    async def _begin_to_leave(self, model: TrainGroup) -> None:
        """Where engines have room for all that they take it leaves afterwards: a device that copies takes three times
        as long to give memory."""
        free = await model.shed()
        if not self._have_room(free, "weights", "kv_cache"):
            await model.begin_offload("rest")
            await model.begin_offload("parameters")

    async def to_generation(self) -> None:
        """The engines have their weights, and take memory for keys and values."""
        await self._wake("kv_cache", make_room=self._clear)
        self._leaving = asyncio.ensure_future(self._clear())
        await self._awake()

    async def _wake(self, tag: Tag, *, make_room: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Engines that sleep take memory, after room was made for it unless they have it already."""
        if not self._sleeping:  # nobody takes any
            return
        if make_room is not None:
            free = await self._trainer.free_bytes() if tag in self._taken else []
            if not self._have_room(free, tag):
                await make_room()
        before = await self._trainer.free_bytes()
        with self._timed(f"wake_{tag}"):
            await self._all(lambda engine: engine.wake_up(tag, timeout_s=TIMEOUT_S))
        after = await self._trainer.free_bytes()
        taken = [b - a for b, a in zip(before, after, strict=True)]
        self._taken.setdefault(tag, deque(maxlen=REMEMBERED)).append(taken)

    def _have_room(self, free: Sequence[int], *tags: Tag) -> bool:
        """Whether so many free bytes of each device are enough for all that engines were seen to take."""
        if not all(tag in self._taken for tag in tags):
            return False
        most = [[max(each) for each in zip(*self._taken[tag], strict=True)] for tag in tags]
        needs = map(sum, zip(*most, strict=True))
        return all(have >= need + MARGIN_BYTES for have, need in zip(free, needs, strict=True))

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        clock = asyncio.get_running_loop().time
        begin = clock()
        yield
        self._note({f"perf/turn_time/{what}": clock() - begin})

    @asynccontextmanager
    async def comparing(self) -> AsyncIterator[None]:
        """The trainer has its parameters on the devices beside the engines, for a short pass.

        Raises:
            UserError: they have no room there.
        """
        if not self.trainer_leaves:
            yield
            return
        self._comparing = True
        try:
            async with self._moved:
                await self._moved.wait_for(lambda: self._starting == 0)
            await self._left()
            await self._trainer.onload("parameters")
            yield
        finally:
            await self._trainer.offload("parameters")
            async with self._moved:
                self._comparing = False
                self._moved.notify_all()

    @asynccontextmanager
    async def visit(self, model: TrainGroup) -> AsyncIterator[None]:
        """The model has the devices between two rollouts, and the engines keep their weights."""
        async with self._turn:
            await self._sleep(1)
            await self._enter(model)
            yield
            await self._leave()
            await self._all(lambda engine: engine.wake_up(timeout_s=TIMEOUT_S))
            await self._awake()

    @asynccontextmanager
    async def start_of_engine(self) -> AsyncIterator[None]:
        """Waits until an engine may take all its memory; no model comes to the devices within."""
        async with self._moved:
            await self._moved.wait_for(lambda: self._lent or not (self._asleep or self._comparing))
            self._starting += 1
        try:
            await self._left()
            yield
        finally:
            async with self._moved:
                self._starting -= 1
                self._moved.notify_all()

    async def _come(self, model: TrainGroup) -> None:
        """The model has the devices to itself; engines that were there forget their weights."""
        await self._sleep(2)
        await self._enter(model)

    async def _sleep(self, level: int) -> None:
        if not self.engines_sleep:
            return
        if not self._asleep:
            self._asleep = True
            self._fleet.hush()
        async with self._moved:
            self._lent = False
            await self._moved.wait_for(lambda: self._starting == 0)
        awake = [engine for engine in self._fleet if engine not in self._sleeping]
        if not awake:  # and what was noted when they fell asleep stays
            return
        with self._timed("sleep"):
            await self._fleet.each(lambda engine: engine.sleep(2 if level == 2 else 1, timeout_s=TIMEOUT_S), awake)
        self._sleeping.update(awake)

    async def _awake(self) -> None:
        self._sleeping.clear()
        if self._asleep:
            self._fleet.unhush()
        async with self._moved:
            self._asleep = False
            self._moved.notify_all()

    async def _enter(self, model: TrainGroup) -> None:
        await self._left()
        if self.trainer_leaves and self._here is not model:
            await self._leave()
            with self._timed("come"):
                await model.onload("parameters")
                await model.onload("rest")
            self._here = model

    async def _left(self) -> None:
        """The trainer is not on its way out any more."""
        if self._leaving is not None:
            await asyncio.shield(self._leaving)

    async def _clear(self) -> None:
        """Nothing of the trainer is on the devices."""
        await self._leave()
        if self._copied:
            self._copied = False
            await self._trainer.drop_copies()

    async def _leave(self) -> None:
        if self._here is not None:
            await self.dismiss(self._here)

    async def dismiss(self, model: TrainGroup) -> None:
        """The model leaves the devices, if models do that."""
        if self.trainer_leaves:
            with self._timed("leave"):
                await model.offload("rest")
                await model.offload("parameters")
            self._here = None if self._here is model else self._here

    async def _all(self, call: Callable[[EngineControl], Coroutine[Any, Any, None]]) -> None:
        """Calls all that sleep."""
        await self._fleet.each(call, [engine for engine in self._fleet if engine in self._sleeping])


class Guest:
    """Implements ``ports.ScoringTrainer``: a model which takes turns on a trainer's devices."""

    def __init__(self, turns: Turns, model: TrainGroup) -> None:
        self._turns, self._model = turns, model

    async def started(self) -> None:
        """It leaves, to make room for the trainer, which starts next."""
        if self._turns.trainer_leaves:
            await self._model.prepare_to_leave()
        await self._turns.dismiss(self._model)

    async def score(self, batch: RolloutBatch) -> dict[int, TokenScores]:
        async with self._turns.computing(self._model):
            return await self._model.score(batch)

    async def train(self, batch: RolloutBatch) -> TrainResult:
        async with self._turns.computing(self._model):
            return await self._model.train(batch)

    async def save(self, directory: Path) -> None:
        async with self._turns.visit(self._model):
            await self._model.save(directory)
