"""Ending what is generated, while engines are lost."""

import pytest

from tests.rollout.fakes import FakeGenerator, FakeRewarder
from vime.errors import EngineError
from vime.rollout.runner import Gate, Runner


class Unstoppable(FakeGenerator):
    async def abort(self) -> None:
        raise EngineError("1 requests did not end within 60 s of being aborted")


async def generate(sample, params, evaluation):
    return [sample]


def make(requeues: int | None) -> Runner:
    return Runner(generate, FakeRewarder(), seed=1, concurrency=1, gate=Gate(Unstoppable()), requeues=requeues)


async def test_an_abort_that_fails_halts_all_the_same_where_lost_engines_are_tolerated():
    async with make(requeues=3).halt():
        pass


async def test_an_abort_that_fails_ends_the_run_where_they_are_not():
    with pytest.raises(EngineError, match="did not end within 60 s"):
        async with make(requeues=None).halt():
            pass
