"""Processes that asyncio started."""

from __future__ import annotations

import asyncio

_POLL_S = 0.02


async def ended(process: asyncio.subprocess.Process) -> int:
    """Waits for the process alone, and returns its status.

    ``process.wait()`` also waits until nobody holds the process's pipes any more, which is never where it left a daemon
    (CPython 3.11, ``BaseSubprocessTransport._try_finish``).
    """
    while process.returncode is None:  # noqa: ASYNC110  there is no event for it
        await asyncio.sleep(_POLL_S)
    return process.returncode


def close_pipes(process: asyncio.subprocess.Process) -> None:
    """Lets go of the pipes of a process that has ended, whoever else holds them."""
    process._transport.close()  # type: ignore[attr-defined]  # it has no public name
