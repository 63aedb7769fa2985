"""The ways from the trainer into engines: memory of one machine or of its GPUs, a process group, or a folder on a disk
that all see.

Importable without torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from vime.errors import last_line
from vime.serving.control import EngineControl
from vime.serving.http import EngineError
from vime.types import WeightVersion
from vime.weights.invitation import Invitation, SendReport
from vime.weights.plan import WeightPlan
from vime.weights.sync import SyncError, every_engine, failures_of, step

__all__ = ["BUCKET_BYTES", "Broadcast", "Broadcaster", "DeviceMemory", "Disk", "Export", "Resting", "SharedMemory"]

BUCKET_BYTES = 512 << 20
OPERATION_TIMEOUT_S = 120.0
"""Most that one step of a process group may take: until all have joined, until all are ready, and for each bucket."""


class Export(Protocol):
    """Packed weights that engines on the same machine can read."""

    @property
    def plan(self) -> WeightPlan: ...

    @property
    def path(self) -> str: ...

    @property
    def handles(self) -> Mapping[str, str]: ...


class Resting:
    """Implements ``sync.Transfer`` for weights that stay where they are until the next sync; each engine reads them.

    Args:
        where: fields of the engine's ``UpdateInfo`` that say where they are.
        doing: how errors name the step in which they are read.
    """

    def __init__(self, plan: WeightPlan, where: Mapping[str, Any], *, doing: str = "load") -> None:
        self._plan, self._where, self._doing = plan, where, doing

    async def announce(self, engines: Sequence[EngineControl], version: WeightVersion, *, timeout_s: float) -> None:
        info = {"plan": self._plan.to_json()}
        await every_engine(engines, lambda engine: step("announce", engine.announce(info, timeout_s=timeout_s)))

    async def load(self, engines: Sequence[EngineControl], *, timeout_s: float) -> Mapping[EngineControl, EngineError]:
        return await failures_of(engines, lambda engine: self._load(engine, timeout_s))

    async def _load(self, engine: EngineControl, timeout_s: float) -> None:
        info = {"digest": self._plan.digest, **self._where}
        await step(self._doing, engine.update(info, timeout_s=timeout_s))


class SharedMemory(Resting):
    """In a buffer that the trainer has filled, for engines on its machine.

    Args:
        bucket_bytes: how much an engine loads at a time.
    """

    def __init__(self, export: Export, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(export.plan, {"path": export.path, "bucket_bytes": bucket_bytes})


class DeviceMemory(Resting):
    """On the devices that trainer and engines take turns on; each process of an engine reads the copy on its own."""

    def __init__(self, export: Export) -> None:
        super().__init__(export.plan, {"handles": dict(export.handles)})


class Disk(Resting):
    """In a Hugging Face folder that the engines see under this path; they load one tensor at a time."""

    def __init__(self, plan: WeightPlan, folder: Path) -> None:
        super().__init__(plan, {"folder": str(folder)}, doing=f"load {folder}")  # vLLM hides paths in what it answers


class Broadcaster(Protocol):
    """The trainer's end of a process group (``weights.broadcast.Sender``), as the orchestration sees it."""

    async def weight_plan(self, version: WeightVersion) -> WeightPlan:
        """What the sync that begins now will carry as that version; for each sync, before anything is paused."""

    async def invite_engines(self, members: int, timeout_s: float) -> Invitation:
        """Listens for so many processes. What was before is closed."""

    async def join_engines(self) -> None:
        """Waits until all who were invited have come."""

    async def broadcast_weights(self, bucket_bytes: int) -> SendReport:
        """Sends all weights to the group, in buckets."""


class Broadcast:
    """Implements ``sync.Transfer``: one broadcast from the trainer's first rank reaches all processes of all engines.

    The group is made at the first sync and kept. When an engine fails during a broadcast, the others have half of the
    new weights: a group without it is made at once, and everything is sent to them again. An engine that was restarted
    is another ``EngineControl``.
    """

    def __init__(self, trainer: Broadcaster, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._trainer = trainer
        self._bucket_bytes = bucket_bytes
        self._members: dict[EngineControl, range] = {}  # the ranks of each engine's processes
        self._invitation: Invitation | None = None
        self._plan: WeightPlan | None = None

    async def announce(self, engines: Sequence[EngineControl], version: WeightVersion, *, timeout_s: float) -> None:
        """The plan first, so that one who refuses it keeps nobody waiting in a group."""
        self._plan = await self._trainer.weight_plan(version)
        info = {"plan": self._plan.to_json()}
        await every_engine(engines, lambda engine: step("announce", engine.announce(info, timeout_s=timeout_s)))
        await self._connect(engines, timeout_s)

    async def _connect(self, engines: Sequence[EngineControl], timeout_s: float) -> None:
        """Makes a group of these engines, unless it is there."""
        if list(self._members) == list(engines):
            return
        self._members = {}
        sizes: dict[EngineControl, int] = {}

        async def ask(engine: EngineControl) -> None:
            sizes[engine] = await engine.world_size(timeout_s=timeout_s)

        await every_engine(engines, lambda engine: step("size", ask(engine)))
        deadline_s = min(timeout_s, OPERATION_TIMEOUT_S)
        self._invitation = await self._trainer.invite_engines(sum(sizes.values()), deadline_s)
        first, members = 1, {}
        for engine in engines:
            members[engine] = range(first, first + sizes[engine])
            first += sizes[engine]
        joined, failed = await asyncio.gather(
            self._trainer.join_engines(),
            failures_of(engines, lambda engine: step("join", self._invite(engine, members[engine], timeout_s))),
            return_exceptions=True,
        )
        if isinstance(failed, BaseException):
            raise failed
        if failed:  # the trainer knows who was late or gone, or has failed itself; the engines see only that it left
            cause = (
                f"the trainer says: {last_line(str(joined) or type(joined).__name__)}; "
                if isinstance(joined, BaseException)
                else ""
            )
            raise SyncError({engine.url: f"{cause}{error}" for engine, error in failed.items()})
        if isinstance(joined, BaseException):
            raise joined
        self._members = members

    async def _invite(self, engine: EngineControl, ranks: range, timeout_s: float) -> None:
        assert self._plan is not None and self._invitation is not None
        info = {"plan": self._plan.to_json(), **self._invitation.to_json(), "rank_offset": ranks.start}
        await engine.announce(info, timeout_s=timeout_s)

    async def load(self, engines: Sequence[EngineControl], *, timeout_s: float) -> Mapping[EngineControl, EngineError]:
        lost: dict[EngineControl, EngineError] = {}
        remaining = list(engines)
        while remaining:
            try:
                await self._connect(remaining, timeout_s)
            except SyncError as error:  # those that have everything already serve it
                lost |= {
                    each: EngineError(error.failures[each.url]) for each in remaining if each.url in error.failures
                }
                remaining = [engine for engine in remaining if engine not in lost]
                continue
            failed, to_blame = await self._broadcast(remaining, timeout_s)
            if failed:
                self._members = {}  # the trainer has left the group
            culprits = [engine for engine in failed if engine in to_blame]
            lost |= {engine: failed[engine] for engine in culprits or failed}
            remaining = [engine for engine in failed if engine not in lost]
            restarted = await failures_of(
                remaining, lambda engine: step("start again", engine.start_update(timeout_s=timeout_s))
            )
            lost |= restarted
            remaining = [engine for engine in remaining if engine not in restarted]
        return lost

    async def _broadcast(
        self, engines: Sequence[EngineControl], timeout_s: float
    ) -> tuple[dict[EngineControl, EngineError], set[EngineControl]]:
        """Which engines do not have the weights, and which of them are to blame for it."""
        assert self._plan is not None
        info = {"digest": self._plan.digest, "bucket_bytes": self._bucket_bytes}
        report, failed = await asyncio.gather(
            self._trainer.broadcast_weights(self._bucket_bytes),
            failures_of(engines, lambda engine: step("load", engine.update(info, timeout_s=timeout_s))),
            return_exceptions=True,
        )
        if isinstance(report, BaseException):  # the trainer's own failure
            self._members = {}
            raise report
        if isinstance(failed, BaseException):
            raise failed
        if report.interrupted and not report.failures:
            why = EngineError(f"the broadcast was interrupted: {report.interrupted}")
            failed = {engine: failed.get(engine, why) for engine in engines}
        blamed = {self._engine_of(rank): reason for rank, reason in report.failures.items()}
        for engine, reason in blamed.items():
            failed[engine] = EngineError(f"{failed.get(engine, engine)}; the trainer says: {reason}")
        return failed, set(blamed)

    def _engine_of(self, rank: int) -> EngineControl:
        return next(engine for engine, ranks in self._members.items() if rank in ranks)
