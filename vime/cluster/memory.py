"""How much memory a run takes on this machine, all its processes together."""

from __future__ import annotations

import asyncio
import contextlib
import os
from types import TracebackType
from typing import Self

import psutil

PERIOD_S = 5.0


class PeakMemory:
    """Samples the proportional set size (each shared page counted once) of this process and all below it.

    An asynchronous context manager; ``peak_bytes`` is None where the system does not tell.
    """

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            now = await asyncio.to_thread(tree_bytes, os.getpid())
            if now is not None:
                self.peak_bytes = max(now, self.peak_bytes or 0)
            await asyncio.sleep(PERIOD_S)


def tree_bytes(pid: int) -> int | None:
    """The proportional set size of a process and its descendants, in bytes."""
    total = None
    for process in _tree(pid):
        with contextlib.suppress(psutil.Error, OSError, AttributeError):
            total = (total or 0) + int(process.memory_full_info().pss)
    return total


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []
