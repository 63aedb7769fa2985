"""The ledger of memory beside a run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from vime.cluster.calls import RemoteError
from vime.cluster.memory import MemoryLedger


async def nobody_moves() -> None: ...


async def test_a_ledger_notes_both_sides_without_being_waited_for() -> None:
    noted: dict[str, float] = {}
    was_noted = asyncio.Event()

    def note(metrics: Mapping[str, float]) -> None:
        noted.update(metrics)
        was_noted.set()

    async def trainer() -> float:
        return 3.0

    async def engines() -> Mapping[str, float]:
        return {"engine": 2.0}

    ledger = MemoryLedger(trainer, engines, note)
    ledger.training()
    assert noted == {}
    await was_noted.wait()
    assert noted == {"memory/engine/train": 2.0}
    was_noted.clear()
    ledger.generating(nobody_moves)
    await was_noted.wait()
    assert noted == {"memory/engine/train": 2.0, "memory/engine/generate": 2.0, "memory/actor/generate": 3.0}
    await ledger.close()


async def test_a_process_that_is_gone_is_not_the_ledgers_affair() -> None:
    asked = asyncio.Event()

    async def gone() -> Mapping[str, float]:
        asked.set()
        raise RemoteError("engine 0 is gone")

    async def hangs() -> float:
        await asyncio.sleep(3600)
        return 0.0

    noted: list[Mapping[str, float]] = []
    ledger = MemoryLedger(hangs, gone, noted.append)
    ledger.generating(nobody_moves)
    await asked.wait()
    await asyncio.sleep(0)
    await ledger.close()
    assert noted == []
