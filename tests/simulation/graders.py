"""Made-up graders: a score that anybody can work out again, given late or not at all."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from typing import Any

from tests.simulation.clock import TICK
from tests.simulation.scenario import Faults
from tests.simulation.world import World
from vime.types import Grade

DEADLINE_S = 30.0


def score_of(response: str, label: str) -> float:
    """0 or 1, each as often as the other for most prompts; but of some all answers are wrong, of some all are right."""
    kind = zlib.crc32(label.encode()) % 8
    return float(kind == 0 or (kind != 1 and zlib.crc32(f"{label} {response}".encode()) % 2))


class FakeGraders:
    """Implements ``ports.GraderPool``."""

    def __init__(self, world: World, faults: Faults) -> None:
        self._world = world
        self._faults = faults

    async def grade(self, rm_type: str, response: str, label: str | None, metadata: Mapping[str, Any]) -> Grade:
        assert label is not None
        chance, identity = self._world.chance, (label, zlib.crc32(response.encode()))
        if chance.hits(self._faults.graders_hang, "grader hangs", *identity):
            await asyncio.sleep(DEADLINE_S)
            return Grade.error(f"deadline of {DEADLINE_S:g} s exceeded")
        slow = chance.hits(self._faults.graders_slow, "grader is slow", *identity)
        await asyncio.sleep(chance.seconds(TICK, DEADLINE_S if slow else 0.25, "grading", *identity))
        if chance.hits(self._faults.graders_fail, "grader fails", *identity):
            return Grade.error("the grader's process ended")
        return Grade(score=score_of(response, label))

    async def close(self) -> None: ...
