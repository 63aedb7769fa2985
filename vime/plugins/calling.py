"""Calls of users' functions. Whatever one raises is its own failure, of whatever kind it is, and none that will not end
is waited for.

``sys.exit``, a CancelledError of a task that the function itself cancelled, GeneratorExit: each is no ``Exception``.
Raised on, it would end the run without a cause, or make it believe that somebody interrupted it. What ends a run is an
interrupt, or a cancellation of the task that *waits* for the function.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

GRACE_S = 10.0
"""For a coroutine to end in order once it is cancelled; agents and sandboxes have some seconds of their own."""

MOST_CHARS = 1000
"""What is kept of what an exception says."""


class Raised(Exception):
    """A function of a user raised ``error``."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class OutOfTime(Exception):
    """A function of a user had not returned when its deadline passed."""


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """A block that runs plain code of users. No cancellation comes in there; an interrupt does, in the main thread.

    Raises:
        Raised: what the code raised, of whatever kind.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if threading.current_thread() is threading.main_thread():
            raise
        raise Raised(error) from error
    except BaseException as error:
        raise Raised(error) from error


async def in_time(
    call: Callable[[], Awaitable[T]], timeout_s: float | None = None, *, grace_s: float | None = None
) -> T:
    """What a user's coroutine returns. It runs in a task of its own.

    Args:
        call: makes the coroutine.
        timeout_s: its deadline; None: it has none.
        grace_s: how long it is waited for when it is cancelled, here or together with whoever waits for it; None:
            ``GRACE_S``. One that goes on after that is left behind.

    Raises:
        Raised: what it raised, of whatever kind.
        OutOfTime: it had not returned by its deadline.
    """
    task = asyncio.create_task(_outcome(call))
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        await _ended(task, grace_s)
        raise
    if not done:
        await _ended(task, grace_s)
        raise OutOfTime
    if task.cancelled():  # before it had begun
        raise Raised(asyncio.CancelledError())
    error, result = task.result()
    if error is not None:
        raise Raised(error) from error
    return result  # type: ignore[return-value]


async def _outcome(call: Callable[[], Awaitable[T]]) -> tuple[BaseException | None, T | None]:
    """A task that raises SystemExit or KeyboardInterrupt would end the event loop. After an interrupt that ends anyway,
    because its main task is cancelled by then."""
    try:
        return None, await call()
    except BaseException as error:
        return error, None


async def _ended(task: asyncio.Task[Any], grace_s: float | None) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=GRACE_S if grace_s is None else grace_s)


def raised(error: BaseException) -> str:
    """ "raised ValueError: no answer (rewards.py:12)", on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    words = said(error)
    return f"raised {type(error).__name__}{': ' + words if words else ''}{where}"


def said(error: BaseException) -> str:
    """What an exception says, on one line of limited length; its class may be the user's, and fail at that too."""
    try:
        with guarded():
            words = " ".join(str(error).split())
    except Raised:
        return "(what it says cannot be read: its __str__ raises)"
    return words if len(words) <= MOST_CHARS else f"{words[:MOST_CHARS]} …"
