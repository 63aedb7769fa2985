"""Running coroutines together, and ending tasks."""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_S = 30.0
"""For what was cancelled to end; more than an orderly end takes."""

logger = logging.getLogger(__name__)


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs all at once and returns their results in order.

    The first failure cancels the others, waits for them, and is raised as itself rather than inside a group.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise _first(failures) from None
    return [task.result() for task in tasks]


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def cancel_all(tasks: Sequence[asyncio.Task[Any]], timeout_s: float | None = None) -> None:
    """Cancels the tasks and waits until each has really ended. One that does not is left behind with a warning.

    Args:
        timeout_s: how long that is waited for; None: ``CANCEL_S``.
    """
    limit_s = CANCEL_S if timeout_s is None else timeout_s
    for task in tasks:
        task.cancel()
    if not tasks:
        return
    ended, left = await asyncio.wait(tasks, timeout=limit_s)
    await asyncio.gather(*ended, return_exceptions=True)  # nobody else asks what they raised
    for task in left:
        logger.warning(
            "%s is left behind: a function of it goes on %g s after it was cancelled; it must not catch CancelledError",
            *(task.get_name(), limit_s),
        )


@contextmanager
def event_loop() -> Iterator[asyncio.Runner]:
    """An event loop for the time of the block, as ``asyncio.run`` has one. That waits for ever for tasks that will not
    end when they are cancelled; here they end with the process."""
    runner = asyncio.Runner()
    try:
        yield runner
    finally:
        runner.run(_end_all_tasks())
        left = asyncio.all_tasks(runner.get_loop())
        for task in left:
            _never_let_go(task)
        if not left:
            runner.close()


def _never_let_go(task: asyncio.Task[Any]) -> None:
    """At its end the interpreter throws a GeneratorExit into every coroutine that is left. One with a bare ``except``
    in a loop would catch that too, and the process never end: so there is a reference that nothing takes away."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))


async def _end_all_tasks() -> None:
    await cancel_all([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])
