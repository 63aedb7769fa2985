"""Carries an export into every engine, at one version, and leaves no engine paused or half loaded in service.

The order for each engine: announce the plan (before anything stops), pause with running requests kept, start, load,
finish under the new version, drop cached keys and values, resume. All engines take each step at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vime.serving.control import EngineControl
from vime.serving.http import EngineError
from vime.types import WeightVersion
from vime.weights.plan import WeightPlan

CLEANUP_TIMEOUT_S = 30.0
BUCKET_BYTES = 512 << 20


class SyncError(EngineError):
    """Weights did not reach every engine. The message names each engine that failed, the step and the reason.

    Engines that were touched before they failed are marked ``dead``; all others serve, under the new version if they
    came to the end. ``failures``: the engines' URLs → what went wrong.
    """

    def __init__(self, failures: dict[str, str]) -> None:
        super().__init__("; ".join(failures.values()))
        self.failures = failures


class Export(Protocol):
    """Packed weights that engines on the same machine can read."""

    @property
    def plan(self) -> WeightPlan: ...

    @property
    def path(self) -> str: ...


@dataclass(kw_only=True)
class SyncReport:
    """How long a sync took, in seconds; the longest over the engines where they differ."""

    announced_s: float = 0.0
    paused_s: float = 0.0  # from asking to pause until generation went on
    steps_s: dict[str, float] = field(default_factory=dict)


async def sync_engines(
    export: Export,
    engines: Sequence[EngineControl],
    version: WeightVersion,
    *,
    timeout_s: float = 600.0,
    bucket_bytes: int = BUCKET_BYTES,
) -> SyncReport:
    """Makes every engine serve the exported weights as ``version``.

    The export must not change before this returns.

    Args:
        timeout_s: deadline of each step of each engine.
        bucket_bytes: how much an engine loads at a time.

    Raises:
        SyncError: an engine refused the plan (then none was touched), or failed later.
    """
    report = SyncReport()
    clock = asyncio.get_running_loop().time
    begin = clock()
    plan = export.plan.to_json()
    await _all(engines, lambda engine: _step(engine, "announce", engine.announce(plan, timeout_s=timeout_s)))
    report.announced_s = clock() - begin
    update = _Update(export, version, timeout_s, bucket_bytes, report)
    begin = clock()
    await _all(engines, update.run)
    report.paused_s = clock() - begin
    return report


class _Update:
    """The part of a sync during which an engine does not generate."""

    def __init__(
        self, export: Export, version: WeightVersion, timeout_s: float, bucket_bytes: int, report: SyncReport
    ) -> None:
        self._export = export
        self._version = version
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._report = report

    async def run(self, engine: EngineControl) -> None:
        """Resumes the engine in the end, unless its weights were touched and are not whole: then it is marked dead."""
        touched = False
        try:
            await self._step(engine, "pause", engine.pause("keep", timeout_s=self._timeout_s))
            await self._step(engine, "start", engine.start_update(timeout_s=self._timeout_s))
            touched = True
            await self._load(engine)
            await self._step(engine, "finish", engine.finish_update(self._version, timeout_s=self._timeout_s))
            await self._step(engine, "reset", engine.reset_prefix_cache(timeout_s=self._timeout_s))
            await self._step(engine, "resume", engine.resume(timeout_s=self._timeout_s))
        except BaseException as error:
            await asyncio.shield(_give_up(engine, str(error) or type(error).__name__, touched=touched))
            raise

    async def _load(self, engine: EngineControl) -> None:
        plan = self._export.plan
        for first, last in plan.buckets(self._bucket_bytes):
            info = {"digest": plan.digest, "path": self._export.path, "first": first, "last": last}
            names = f"load {plan.tensors[first].name} to {plan.tensors[last - 1].name}"
            await self._step(engine, names, engine.update(info, timeout_s=self._timeout_s), total="load")

    async def _step(self, engine: EngineControl, name: str, call: Awaitable[None], total: str = "") -> None:
        clock = asyncio.get_running_loop().time
        begin = clock()
        await _step(engine, name, call)
        steps = self._report.steps_s
        steps[total or name] = max(steps.get(total or name, 0.0), clock() - begin)


async def _step(engine: EngineControl, name: str, call: Awaitable[None]) -> None:
    try:
        await call
    except EngineError as error:
        raise EngineError(f"weight sync, step {name!r}: {error}") from None


async def _give_up(engine: EngineControl, reason: str, *, touched: bool) -> None:
    """Lets an untouched engine go on; ends the requests of one that must not be used any more."""
    try:
        if touched:
            engine.dead = reason
            await engine.abort_all(timeout_s=CLEANUP_TIMEOUT_S)
        else:
            await engine.resume(timeout_s=CLEANUP_TIMEOUT_S)
    except EngineError as error:
        engine.dead = engine.dead or f"{reason}; then {error}"


async def _all(engines: Sequence[EngineControl], step: Callable[[EngineControl], Awaitable[None]]) -> None:
    """Takes a step on every engine and waits for all of them, whatever happens to one."""
    results = await asyncio.gather(*(step(engine) for engine in engines), return_exceptions=True)
    failures: dict[str, str] = {}
    for engine, result in zip(engines, results, strict=True):
        if isinstance(result, EngineError):
            failures[engine.url] = str(result)
        elif isinstance(result, BaseException):
            raise result
    if failures:
        raise SyncError(failures)
