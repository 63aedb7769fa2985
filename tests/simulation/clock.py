"""An event loop without waiting: when nothing is ready, time jumps to the next timer.

Three things make a run a function of its seed:

* Times are multiples of ``TICK``, a power of two, so that sums are exact and a run that starts an hour later does the
  same things an hour later.
* Sets of tasks and futures are iterated in an order that the seed decides, not in that of their addresses. So code that
  iterates what ``asyncio.wait`` returns meets every order, but the same one each time.
* Nothing is read from outside: a loop with neither callbacks nor timers left has stopped for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Coroutine
from typing import Any

TICK = 1 / 1024  # seconds


class Stopped(Exception):
    """The run is not over, and nothing will ever happen again (or nothing but waiting does)."""


class _Task(asyncio.Task):  # type: ignore[type-arg]
    def __init__(self, coroutine: Coroutine[Any, Any, Any], *, order: int, **options: Any) -> None:
        self._order = order
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._order


class _Future(asyncio.Future):  # type: ignore[type-arg]
    def __init__(self, *, order: int, loop: asyncio.AbstractEventLoop) -> None:
        self._order = order
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._order


class VirtualLoop(asyncio.BaseEventLoop):
    """Args:
    seed: of the order in which sets of tasks are iterated.
    ends_after: virtual seconds after which a run counts as stopped.
    most_steps: passes of the loop after which it does, though time may stand still.
    """

    def __init__(self, seed: int, *, ends_after: float, most_steps: int) -> None:
        super().__init__()
        self._now = 0.0
        self._ends_after, self._steps_left = ends_after, most_steps
        self._orders = random.Random(seed)
        self._selector = self  # what the base class asks for events, with the time that it may take
        self._clock_resolution = TICK / 2
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self._now

    def order(self) -> int:
        return self._orders.getrandbits(48)

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(order=self.order(), loop=self)

    def call_at(self, when: float, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        return super().call_at(math.ceil(when / TICK) * TICK, *args, **kwargs)

    def select(self, timeout: float | None) -> list[Any]:
        """Nothing ever comes from outside; the wait for the next timer is over at once."""
        self._steps_left -= 1
        if timeout is None:
            raise Stopped("nothing is scheduled, and the run is not over")
        if timeout > 0:
            self._now += timeout
        if self._now > self._ends_after:
            raise Stopped(f"the run is not over after {self._ends_after:g} virtual seconds")
        if self._steps_left <= 0:
            raise Stopped(f"the run is not over after so many steps, at {self._now:g} s")
        return []

    def sweep(self) -> None:
        """Ends what still waits when a run has stopped, so that nothing of it shows up in another one."""
        self._ends_after, self._steps_left = self._now + 1000, 10_000
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(Stopped):
            self.run_until_complete(asyncio.wait(tasks))

    def _process_events(self, events: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any) -> _Task:
    assert isinstance(loop, VirtualLoop)
    return _Task(coroutine, order=loop.order(), loop=loop, **options)
