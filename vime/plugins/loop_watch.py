"""How long a coroutine keeps its event loop from running anything else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")

BEAT_S = 0.005


async def watched(work: Awaitable[T]) -> tuple[T, float]:
    """What ``work`` returns, and the longest time in seconds in which the loop did nothing but a single step of it."""
    beat = _Beat()
    task = asyncio.create_task(beat.go_on())
    await asyncio.sleep(0)  # the beat has begun
    try:
        return await work, beat.longest()
    finally:
        task.cancel()


class _Beat:
    def __init__(self) -> None:
        self._last, self._longest = perf_counter(), 0.0

    async def go_on(self) -> None:
        self._last = perf_counter()
        while True:
            await asyncio.sleep(BEAT_S)
            self._longest, self._last = self.longest(), perf_counter()

    def longest(self) -> float:
        """Also the time since the last beat: work that never waits leaves no room for one."""
        return max(self._longest, perf_counter() - self._last - BEAT_S)
