"""Mistakes of an orchestration, planted in tests only: the invariants must find each of them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence

from tests.simulation.engines import FakeEngine
from tests.simulation.run import Driver, WatchedSource
from tests.simulation.trainer import FakeSync, FakeTransfer
from vime.ports import Generator
from vime.types import Generation, Group, SamplingParams


class LosesAReply(Driver):
    """An answer in forty arrives, and nobody is told."""

    told_as = "the run is not over"

    def generator(self) -> Generator:
        return _Deaf(super().generator())


class _Deaf:
    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._answers = 0

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session_id: str) -> Generation:
        answer = await self._generator.generate(token_ids, params, session_id=session_id)
        self._answers += 1
        if self._answers % 40 == 0:
            await asyncio.get_running_loop().create_future()
        return answer

    async def abort(self) -> None:
        await self._generator.abort()


class TrainsTwice(Driver):
    """A group in ten is given out once more, as if it were still in the buffer."""

    told_as = "was trained"

    def make_source(self) -> WatchedSource:
        return _Generous(self.world, self.config)


class _Generous(WatchedSource):
    def get_samples(self, n: int) -> list[Group]:
        groups = super().get_samples(n)
        again = [copy.deepcopy(group) for group in groups if group[0].group_index % 10 == 9]  # type: ignore[operator]
        self.add_samples(again)
        return groups


class SwapsStale(Driver):
    """After the first sync one engine takes the name of new weights without the weights."""

    told_as = "is not that of the weights of version"

    def make_sync(self, version: int) -> FakeSync:
        return _HalfSync(self.world, self.trainer, self.client, self.scenario.faults, version)


class _HalfSync(FakeSync):
    def transfer(self, weights: int) -> FakeTransfer:
        return _HalfTransfer(weights)


class _HalfTransfer(FakeTransfer):
    async def load(self, engines: Sequence[FakeEngine], *, timeout_s: float):  # type: ignore[no-untyped-def]
        stale = [engine for engine in engines if engine.index == 0 and engine.version > 0]
        return await super().load([engine for engine in engines if engine not in stale], timeout_s=timeout_s)


BUGS = (LosesAReply, TrainsTwice, SwapsStale)
