"""What users' functions may raise beside an Exception, and a coroutine that will not end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager

import pytest


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class MuteMapping(Mapping[str, float]):
    def __getitem__(self, key: str) -> float:
        raise SystemExit(4)

    def __iter__(self) -> Iterator[str]:
        raise SystemExit(4)

    def __len__(self) -> int:
        return 1


def exits() -> None:
    sys.exit(3)


def exits_well() -> None:
    sys.exit(0)


def closes() -> None:
    raise GeneratorExit


def raises_a_group() -> None:
    raise BaseExceptionGroup("both", [SystemExit(1), ValueError("no")])


def raises_a_mute_one() -> None:
    raise Mute


def interrupts() -> None:
    raise KeyboardInterrupt


async def awaits_what_it_cancelled() -> None:
    task = asyncio.ensure_future(asyncio.sleep(9))
    task.cancel()
    await task


async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(9)


async def will_not_end(*arguments: object, **keywords: object) -> None:
    while not _ends.is_set():
        try:
            await asyncio.wait_for(_ends.wait(), 3600)
        except asyncio.CancelledError:
            continue


@asynccontextmanager
async def stubbornness(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """A block after which ``will_not_end`` ends after all; nobody waits long for it inside."""
    monkeypatch.setattr("vime.plugins.calling.GRACE_S", 0.01)
    monkeypatch.setitem(globals(), "_ends", asyncio.Event())  # of this event loop
    ends = _ends
    try:
        async with asyncio.timeout(5):
            yield
    finally:
        ends.set()
        await asyncio.sleep(0.01)


_ends = asyncio.Event()

PLAIN: dict[Callable[[], None], str] = {
    exits: "raised SystemExit: 3 (odd.py:",
    exits_well: "raised SystemExit: 0 (odd.py:",
    closes: "raised GeneratorExit (odd.py:",
    raises_a_group: "raised BaseExceptionGroup: both (2 sub-exceptions) (odd.py:",
    raises_a_mute_one: "raised Mute: (what it says cannot be read: its __str__ raises) (odd.py:",
}
"""Function → how it is told."""
