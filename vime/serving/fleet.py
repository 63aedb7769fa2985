"""The engines of a run, and what each of them is fit for: the one list that everybody looks at.

Invariants:
* an engine is in the router only while it serves the run's weights;
* an engine that is lost is in no list any more. It never comes back: what is started in its place is another one.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from vime.serving.control import EngineControl
from vime.serving.http import EngineError, Unreachable

__all__ = ["Fleet", "Membership", "State"]

ADMISSION_TIMEOUT_S = 120.0  # a router that ended is back before: it has 60 s to start, and 30 s to take its engines
RETRY_S = 0.5


class State(enum.Enum):
    """Of an engine that was started."""

    SUSPENDED = "suspended"  # healthy, and without the run's weights: the next sync brings them
    SERVING = "serving"
    DEAD = "dead"


class Membership(Protocol):
    """The list of engines that the router has."""

    async def add(self, url: str) -> None:
        """Has requests sent to a healthy engine; nothing happens if it has it already."""


class Nobody:
    """Implements ``Membership`` where engines are in the router from the start, or there is none."""

    async def add(self, url: str) -> None: ...


class Fleet:
    """Which engines there are.

    Args:
        tolerant: whether the run goes on when an engine is lost (``--use-fault-tolerance``). Without that whatever
            happens to an engine is raised.
    """

    def __init__(self, membership: Membership | None = None, *, tolerant: bool = False) -> None:
        self._membership = membership or Nobody()
        self.tolerant = tolerant
        self._engines: dict[int, EngineControl] = {}
        self._states: dict[EngineControl, State] = {}  # of those that are lost too
        self._router_is_up = True
        self._hushes = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._counts: Counter[str] = Counter()

    @classmethod
    def of(cls, engines: Sequence[EngineControl]) -> Fleet:
        """Engines that were started."""
        fleet = cls()
        for index, engine in enumerate(engines):
            fleet.started(index, engine)
        return fleet

    def __iter__(self) -> Iterator[EngineControl]:
        return iter(self.engines)

    def __getitem__(self, index: int) -> EngineControl:
        """The last one in this place, whatever became of it."""
        return self._engines[index]

    @property
    def places(self) -> Sequence[int]:
        """The numbers of the engines."""
        return list(self._engines)

    @property
    def engines(self) -> list[EngineControl]:
        """Those that are not lost, in the order of their numbers."""
        return [engine for engine in self._engines.values() if self._states[engine] is not State.DEAD]

    @property
    def serving(self) -> list[EngineControl]:
        return [engine for engine in self._engines.values() if self._states[engine] is State.SERVING]

    def state_of(self, engine: EngineControl) -> State:
        return self._states[engine]

    def started(self, index: int, engine: EngineControl) -> None:
        """It is healthy, and has not the run's weights."""
        self._engines[index] = engine
        self._states[engine] = State.SUSPENDED
        self._changed()

    async def admit(self, engine: EngineControl) -> None:
        """The engine has the run's weights, and requests may go to it.

        Raises:
            EngineError: the router does not take it.
        """
        if self._states[engine] is not State.SUSPENDED:
            return
        await self._enter(engine)
        if self._states[engine] is State.SUSPENDED:  # not lost meanwhile
            self._states[engine] = State.SERVING
            self._changed()

    async def _enter(self, engine: EngineControl) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + ADMISSION_TIMEOUT_S
        while True:
            try:
                await self._membership.add(engine.url)
            except Unreachable:
                if clock() > deadline:
                    raise
                await asyncio.sleep(RETRY_S)  # a router that ended is restarted
            else:
                return

    def lose(self, engine: EngineControl, reason: str) -> None:
        """The engine is not to be used any more; nothing happens if it is lost already."""
        if self._states[engine] is not State.DEAD:
            self._states[engine] = State.DEAD
            engine.dead = engine.dead or reason
            self._changed()

    async def loss_of(self, engine: EngineControl) -> str:
        """Waits until the engine is lost; returns why."""
        await self.until(lambda: self._states[engine] is State.DEAD)
        return engine.dead or "lost"

    async def each(
        self,
        call: Callable[[EngineControl], Awaitable[object]],
        engines: Sequence[EngineControl] | None = None,
        *,
        fatal: tuple[type[EngineError], ...] = (),
    ) -> None:
        """Makes a call to all engines, or to these. Engines that fail are lost.

        Raises:
            EngineError: one failed, and the run does not tolerate that, or the error is a ``fatal`` one.
        """
        asked = self.engines if engines is None else list(engines)
        results = await asyncio.gather(*(call(engine) for engine in asked), return_exceptions=True)
        for engine, result in zip(asked, results, strict=True):
            if not isinstance(result, BaseException):
                continue
            if not isinstance(result, EngineError) or isinstance(result, fatal) or not self.tolerant:
                raise result
            self.lose(engine, str(result))

    def router_lost(self) -> None:
        self._router_is_up = False

    def router_back(self) -> None:
        self._router_is_up = True
        self._changed()

    @property
    def is_open(self) -> bool:
        """Whether a request has a way to an engine. Always so in a run that ends with any of its servers."""
        return not self.tolerant or (self._router_is_up and bool(self.serving))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Engines are paused or asleep within: nobody asks them whether they generate."""
        self.hush()
        try:
            yield
        finally:
            self.unhush()

    def hush(self) -> None:
        """Begins what ``quiet`` does."""
        self._hushes += 1
        self._changed()

    def unhush(self) -> None:
        self._hushes -= 1
        self._changed()

    @property
    def is_quiet(self) -> bool:
        return self._hushes > 0

    def count(self, event: str) -> None:
        self._counts[event] += 1

    def taken_counts(self) -> dict[str, float]:
        """How often which event happened since the last call, as metrics."""
        events = ("engine_restarts", "router_restarts", "requests_repeated")
        counts = {f"rollout/{event}": float(self._counts[event]) for event in events}
        self._counts.clear()
        return counts if self.tolerant else {}

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until something that is known here has changed so that the condition holds."""
        while not condition():
            await self.next_change()

    async def next_change(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def wake(self) -> None:
        """Has everybody who waits look at their condition again."""
        self._changed()

    def _changed(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def close(self) -> None:
        for engine in self._states:
            await engine.close()
