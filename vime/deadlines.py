"""Deadlines of users' functions that leave out what is not theirs: the wait for a free place on a busy machine."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_running: contextvars.ContextVar[tuple[Deadline, ...]] = contextvars.ContextVar("deadlines", default=())


class Deadline:
    """So many seconds for a task and what it starts, without those in which some of it waits in ``not_counted``."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._waits = 0
        self._is_over = False
        self._passed = asyncio.Event()
        self._go_on()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that has this deadline. Nothing ends it when that has passed: see ``first_of``."""
        context = contextvars.copy_context()
        context.run(_running.set, (*_running.get(), self))
        return asyncio.create_task(coroutine, context=context)

    async def first_of(self, tasks: Iterable[asyncio.Future[Any]]) -> None:
        """Returns when one of them is done or the deadline has passed. To be awaited once."""
        passed = asyncio.ensure_future(self._passed.wait())
        try:
            await asyncio.wait({*tasks, passed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            passed.cancel()
            self._timer.cancel()
            self._is_over = True

    def _go_on(self) -> None:
        loop = asyncio.get_running_loop()
        self._since = loop.time()
        self._timer = loop.call_later(self._left_s, self._passed.set)

    def _stand_still(self) -> None:
        self._timer.cancel()
        self._left_s -= asyncio.get_running_loop().time() - self._since

    @contextmanager
    def _waited_for(self) -> Iterator[None]:
        self._waits += 1
        if self._waits == 1:
            self._stand_still()
        try:
            yield
        finally:
            self._waits -= 1
            if self._waits == 0 and not self._is_over:
                self._go_on()


@contextmanager
def not_counted() -> Iterator[None]:
    """A block in which the deadlines of the task that runs it stand still."""
    with ExitStack() as stack:
        for deadline in _running.get():
            stack.enter_context(deadline._waited_for())
        yield
