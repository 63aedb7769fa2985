"""A run ends with the last words of the server that is gone."""

import asyncio
import subprocess
import sys
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


async def stubborn(ends: asyncio.Event) -> None:
    """A function of a user's in a loop that tries again whatever happens."""
    while not ends.is_set():
        try:
            await ends.wait()
        except asyncio.CancelledError:
            continue


async def test_work_that_will_not_be_cancelled_holds_up_an_end_for_so_long_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vime.cluster.supervision.END_S", 0.05)
    ends = asyncio.Event()
    task = asyncio.ensure_future(supervised(stubborn(ends), nothing_happens(), none_failed))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert "the training loop is left behind" in caplog.text
    ends.set()


def test_a_process_ends_although_a_task_of_it_will_not() -> None:
    script = (
        "import asyncio, sys\n"
        "from tests.cluster.test_supervision import stubborn\n"
        "from vime.cluster import launch\n"
        "from vime.rollout import tasks\n"
        "tasks.CANCEL_S = 0.05\n"
        "left = []\n"
        "async def run(config):\n"
        "    left.append(asyncio.create_task(stubborn(asyncio.Event())))\n"
        "    await asyncio.sleep(0)\n"
        "launch.run = run\n"
        "sys.exit(launch.main(None) + 7)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=120, check=False)
    assert done.returncode == 7
