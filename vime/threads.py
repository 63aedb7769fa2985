"""Users' plain functions that take long, in threads that hold nothing up."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[[], T], *, name: str) -> T:
    """Runs the function in a daemon thread of its own, and gives up on it when cancelled.

    A thread of an executor would be waited for at the end of the event loop and of the process: a function that does
    not return would keep a failed run alive.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        if not outcome.done():
            set_outcome()

    def tell(set_outcome: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(settle, set_outcome)

    def work() -> None:
        try:
            result = function()
        except BaseException as error:
            failure = error if not isinstance(error, StopIteration) else _as_coroutines_raise_it(error)
            tell(lambda: outcome.set_exception(failure))
        else:
            tell(lambda: outcome.set_result(result))

    context = contextvars.copy_context()
    threading.Thread(target=lambda: context.run(work), name=name, daemon=True).start()
    return await outcome


def _as_coroutines_raise_it(error: StopIteration) -> RuntimeError:
    """A future refuses a StopIteration, and whoever waits for it would wait for ever."""
    raised = RuntimeError("the function raised StopIteration")
    raised.__cause__ = error
    return raised
