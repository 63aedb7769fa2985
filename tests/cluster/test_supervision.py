"""A run ends with the last words of the server that is gone."""

import asyncio
from typing import NoReturn

import pytest

from vime.cluster.supervision import supervised
from vime.serving.http import EngineError


async def none_failed() -> list[str]:
    return []


async def nothing_happens() -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError


async def test_work_ends_and_nothing_goes_on_watching():
    await supervised(asyncio.sleep(0.03), nothing_happens(), none_failed)
    assert len(asyncio.all_tasks()) == 1


async def test_a_dead_server_cancels_the_work():
    async def gives_up() -> NoReturn:
        await asyncio.sleep(0.01)
        raise EngineError("engine 0 ended with status -9")

    with pytest.raises(EngineError, match="engine 0 ended with status -9"):
        await supervised(asyncio.sleep(60), gives_up(), none_failed)
    assert len(asyncio.all_tasks()) == 1


async def test_a_failed_request_is_explained_by_the_server_that_is_gone():
    async def failures() -> list[str]:
        return ["engine 1 ended with status 1: out of memory"]

    async def work() -> None:
        raise EngineError("the router did not answer")

    with pytest.raises(EngineError) as error:
        await supervised(work(), nothing_happens(), failures)
    assert str(error.value).splitlines() == ["the router did not answer", "engine 1 ended with status 1: out of memory"]


async def test_other_errors_pass_through():
    async def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await supervised(work(), nothing_happens(), none_failed)


async def test_cancelling_waits_for_the_work_to_clean_up():
    cleaned = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(True)

    task = asyncio.ensure_future(supervised(work(), nothing_happens(), none_failed))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned == [True]
