"""Carries weights into every engine, at one version, and leaves no engine paused or half loaded in service.

The order for each engine: announce the plan (before anything stops), pause with running requests kept, start, load,
finish under the new version, drop cached keys and values, resume. All engines take each step at the same time. How the
bytes travel is the transfer's affair (``weights.transfers``).

Engines whose keys and values sleep are paused already, and go on by themselves once they have memory for them: nobody
pauses them, and nobody may resume them, for they would compute on memory that is not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vime.serving.control import EngineControl
from vime.serving.http import EngineError
from vime.types import WeightVersion

__all__ = ["SyncError", "SyncReport", "Transfer", "every_engine", "failures_of", "step", "sync_engines"]

CLEANUP_TIMEOUT_S = 30.0


class SyncError(EngineError):
    """Weights did not reach every engine. The message names each engine that failed, the step and the reason.

    Engines that were touched before they failed are marked ``dead``; all others serve, under the new version if they
    came to the end. ``failures``: the engines' URLs → what went wrong. ``untouched``: it came to nothing before any
    engine was paused, so none has the new version; else all have it that did not fail.
    """

    def __init__(self, failures: Mapping[str, str], *, untouched: bool = True) -> None:
        super().__init__("; ".join(failures.values()))
        self.failures = dict(failures)
        self.untouched = untouched


class Transfer(Protocol):
    """A way from the trainer into engines."""

    async def announce(self, engines: Sequence[EngineControl], version: WeightVersion, *, timeout_s: float) -> None:
        """Tells engines what will come, and how; none of them is touched. Raises SyncError."""

    async def load(self, engines: Sequence[EngineControl], *, timeout_s: float) -> Mapping[EngineControl, EngineError]:
        """Brings all weights into engines whose update was started; returns those that do not have them, and why."""


@dataclass(kw_only=True)
class SyncReport:
    """How long a sync took, in seconds; the longest over the engines where they differ."""

    announced_s: float = 0.0
    paused_s: float = 0.0  # from asking to pause until generation went on, or might once engines are awake
    steps_s: dict[str, float] = field(default_factory=dict)


async def sync_engines(
    transfer: Transfer,
    engines: Sequence[EngineControl],
    version: WeightVersion,
    *,
    timeout_s: float = 600.0,
    asleep: bool = False,
) -> SyncReport:
    """Makes every engine serve the trainer's weights as ``version``. They must not change before this returns.

    Args:
        timeout_s: deadline of each step of each engine.
        asleep: the engines have memory for weights, and none for keys and values, which they are to get afterwards.

    Raises:
        SyncError: an engine refused the plan (then none was touched), or failed later.
    """
    clock = asyncio.get_running_loop().time
    report = SyncReport()
    begin = clock()
    await transfer.announce(engines, version, timeout_s=timeout_s)
    report.announced_s = clock() - begin
    begin = clock()
    await _Update(transfer, engines, version, timeout_s, report, asleep=asleep).run()
    report.paused_s = clock() - begin
    return report


class _Update:
    """The part of a sync during which engines do not generate."""

    def __init__(
        self,
        transfer: Transfer,
        engines: Sequence[EngineControl],
        version: WeightVersion,
        timeout_s: float,
        report: SyncReport,
        *,
        asleep: bool,
    ) -> None:
        self._transfer = transfer
        self._engines = list(engines)  # those that take part and have not failed
        self._version = version
        self._timeout_s = timeout_s
        self._report = report
        self._asleep = asleep
        self._touched = False  # whether weights may have been overwritten
        self._failures: dict[str, str] = {}

    async def run(self) -> None:
        """Resumes every engine in the end, unless its weights were touched and are not whole: then it is dead."""
        try:
            if not self._asleep:
                await self._each("pause", lambda engine: engine.pause("keep", timeout_s=self._timeout_s))
            await self._each("start", lambda engine: engine.start_update(timeout_s=self._timeout_s))
            self._touched = True
            await self._load()
            await self._each("finish", lambda e: e.finish_update(self._version, timeout_s=self._timeout_s))
            await self._each("reset", lambda engine: engine.reset_prefix_cache(timeout_s=self._timeout_s))
            if not self._asleep:
                await self._each("resume", lambda engine: engine.resume(timeout_s=self._timeout_s))
        except BaseException as error:
            reason = str(error) or type(error).__name__
            await asyncio.shield(asyncio.gather(*(self._give_up(engine, reason) for engine in self._engines)))
            raise
        if self._failures:
            raise SyncError(self._failures, untouched=False)

    async def _each(self, name: str, call: Callable[[EngineControl], Awaitable[None]]) -> None:
        clock = asyncio.get_running_loop().time
        begin = clock()
        await self._drop(await failures_of(self._engines, lambda engine: step(name, call(engine))))
        self._report.steps_s[name] = clock() - begin

    async def _load(self) -> None:
        clock = asyncio.get_running_loop().time
        begin = clock()
        if self._engines:
            await self._drop(await self._transfer.load(self._engines, timeout_s=self._timeout_s))
        self._report.steps_s["load"] = clock() - begin

    async def _drop(self, failed: Mapping[EngineControl, EngineError]) -> None:
        """Goes on without them."""
        self._engines = [engine for engine in self._engines if engine not in failed]
        self._failures |= {engine.url: str(error) for engine, error in failed.items()}
        await asyncio.gather(*(self._give_up(engine, str(error)) for engine, error in failed.items()))

    async def _give_up(self, engine: EngineControl, reason: str) -> None:
        """Lets an untouched engine go on; ends the requests of one that must not be used any more."""
        try:
            if self._touched:
                engine.dead = reason
                await engine.abort_all(timeout_s=CLEANUP_TIMEOUT_S)
            elif not self._asleep:
                await engine.resume(timeout_s=CLEANUP_TIMEOUT_S)
        except EngineError as error:
            engine.dead = engine.dead or f"{reason}; then {error}"


async def step(name: str, call: Awaitable[None]) -> None:
    """Names the step in the error of a call."""
    try:
        await call
    except EngineError as error:
        raise EngineError(f"weight sync, step {name!r}: {error}") from None


async def failures_of(
    engines: Sequence[EngineControl], call: Callable[[EngineControl], Awaitable[None]]
) -> dict[EngineControl, EngineError]:
    """Makes a call to every engine and waits for all of them, whatever happens to one."""
    results = await asyncio.gather(*(call(engine) for engine in engines), return_exceptions=True)
    failed: dict[EngineControl, EngineError] = {}
    for engine, result in zip(engines, results, strict=True):
        if isinstance(result, EngineError):
            failed[engine] = result
        elif isinstance(result, BaseException):
            raise result
    return failed


async def every_engine(engines: Sequence[EngineControl], call: Callable[[EngineControl], Awaitable[None]]) -> None:
    """Raises SyncError if the call to any engine fails."""
    if failed := await failures_of(engines, call):
        raise SyncError({engine.url: str(error) for engine, error in failed.items()})
