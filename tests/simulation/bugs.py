"""Mistakes of an orchestration, planted in tests only: the invariants must find each of them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Coroutine, Sequence
from typing import Any

from tests.simulation.engines import FakeEngine
from tests.simulation.run import Driver, WatchedSource
from tests.simulation.servers import MakeEngine
from vime.ports import Generator
from vime.types import Generation, Group, SamplingParams


class LosesAReply(Driver):
    """An answer in forty arrives, and nobody is told."""

    told_as = "the run is not over"

    def generator(self, client: Generator) -> Generator:
        return _Deaf(client)


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
    """A group in four is given out once more, as if it were still in the buffer."""

    told_as = "was trained"

    def make_source(self) -> WatchedSource:
        return _Generous(self.world, self.config)


class _Generous(WatchedSource):
    def get_samples(self, n: int) -> list[Group]:
        groups = super().get_samples(n)
        again = [copy.deepcopy(group) for group in groups if group[0].group_index % 4 == 3]  # type: ignore[operator]
        self.add_samples(again)
        return groups


class SwapsStale(Driver):
    """After the first sync one engine takes the name of new weights without the weights."""

    told_as = "is not that of the weights of version"

    @property
    def make_engine(self) -> MakeEngine:
        return _Lazy


class _Lazy(FakeEngine):
    def _update_weights(self, body: Any) -> Coroutine[Any, Any, None] | None:
        weights = self.weights
        updated = super()._update_weights(body)
        if self.index == 0 and self.version > 0 and updated is None:
            self.weights = weights
        return updated


BUGS = (LosesAReply, TrainsTwice, SwapsStale)
