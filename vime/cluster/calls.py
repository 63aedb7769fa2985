"""Waiting for calls to Ray actors: every wait has a name and a deadline, and a failure tells its cause."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from vime.errors import UserError


class RemoteError(RuntimeError):
    """A process of the run failed. The message names the process, what it was doing, and the cause."""


async def wait_all(calls: Sequence[ray.ObjectRef], *, what: str, timeout_s: float) -> list[Any]:
    """The results of the calls, in order. The first failure is raised at once, without waiting for the others.

    Raises:
        UserError: a call raised one; it is passed on as it is.
        RemoteError: a call raised something else, its process died, or the deadline passed.
    """
    waits = [asyncio.ensure_future(_as_coroutine(call)) for call in calls]
    try:
        async with asyncio.timeout(timeout_s):
            return list(await asyncio.gather(*waits))
    except TimeoutError:
        pending = [str(i) for i, wait in enumerate(waits) if not wait.done()]
        raise RemoteError(f"{what}: no answer within {timeout_s:.0f} s from process {', '.join(pending)}") from None
    except RayError as error:
        raise explain(error, what) from None
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def get_all(calls: Sequence[ray.ObjectRef], *, what: str, timeout_s: float) -> list[Any]:
    """``wait_all`` for short calls of those that cannot await; raises the same."""
    try:
        answers: list[Any] = ray.get(list(calls), timeout=timeout_s)
    except GetTimeoutError:
        raise RemoteError(f"{what}: no answer within {timeout_s:.0f} s") from None
    except RayError as error:
        raise explain(error, what) from None
    return answers


async def _as_coroutine(call: ray.ObjectRef) -> Any:
    return await call


def explain(error: RayError, what: str) -> Exception:
    """Turns Ray's exceptions, which carry whole remote tracebacks, into one that starts with the cause."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, UserError):
            return UserError(str(cause))
        if cause is not None:
            return RemoteError(f"{str(error).strip()}\n{what}: {type(cause).__name__}: {cause}")
    if isinstance(error, RayActorError):
        return RemoteError(f"{what}: its process died: {error}")
    return RemoteError(f"{what}: {type(error).__name__}: {error}")
