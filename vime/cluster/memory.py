"""How much memory a run takes: all its processes together on this machine, and trainer and engines in each phase."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Self

import psutil

from vime.cluster.calls import RemoteError

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


class MemoryLedger:
    """Looks at what trainer and engines hold, beside whatever they do, and notes it as metrics.

    Args:
        trainer: what a rank of the actor holds now, in GiB.
        engines: what engines hold, in GiB by kind.
        note: takes metrics of the rollout that is being made.
    """

    def __init__(
        self,
        trainer: Callable[[], Awaitable[float]],
        engines: Callable[[], Awaitable[Mapping[str, float]]],
        note: Callable[[Mapping[str, float]], None],
    ) -> None:
        self._trainer, self._engines, self._note = trainer, engines, note
        self._looking: set[asyncio.Task[None]] = set()

    def training(self) -> None:
        """The trainer has learned and is still there; engines may sleep. (It says itself what it held.)"""
        self._look("train", of_trainer=False)

    def generating(self, settled: Callable[[], Awaitable[None]]) -> None:
        """The engines have new weights and begin to generate.

        Args:
            settled: returns once the trainer has left, if it leaves; before, the change of turns would be seen.
        """
        self._look("generate", of_trainer=True, settled=settled)

    def _look(self, phase: str, *, of_trainer: bool, settled: Callable[[], Awaitable[None]] | None = None) -> None:
        task = asyncio.ensure_future(self._noted(phase, of_trainer, settled))
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)

    async def _noted(self, phase: str, of_trainer: bool, settled: Callable[[], Awaitable[None]] | None) -> None:
        if settled is not None:
            await settled()
        with contextlib.suppress(RemoteError):  # who looks after the processes says why one is gone
            held = {f"memory/{kind}/{phase}": size for kind, size in (await self._engines()).items()}
            if of_trainer:
                held[f"memory/actor/{phase}"] = await self._trainer()
            self._note(held)

    async def close(self) -> None:
        """Never raises."""
        for task in self._looking:
            task.cancel()
        await asyncio.gather(*self._looking, return_exceptions=True)
