"""A deadline counts what its task does, not what it waits for. On a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tests.rollout.worlds import on_virtual_clock
from vime.deadlines import Deadline, not_counted

Body = Callable[[], Awaitable[None]]


async def ends_in_time(body: Body, seconds: float) -> bool:
    async def run() -> None:
        await body()

    deadline = Deadline(seconds)
    task = deadline.start(run())
    await deadline.first_of({task})
    is_done = task.done()
    task.cancel()
    await asyncio.wait({task})
    return is_done


def test_what_takes_too_long_is_told() -> None:
    async def main() -> None:
        assert not await ends_in_time(lambda: asyncio.sleep(0.75), 0.5)
        assert await ends_in_time(lambda: asyncio.sleep(0.25), 0.5)

    on_virtual_clock(main)


def test_waits_do_not_count_also_of_tasks_below_that_overlap() -> None:
    async def wait(seconds: float) -> None:
        with not_counted():
            await asyncio.sleep(seconds)

    async def body() -> None:
        await asyncio.gather(wait(0.5), asyncio.create_task(wait(0.75)))

    assert on_virtual_clock(lambda: ends_in_time(body, 0.25))


def test_what_comes_after_a_wait_counts_with_what_was_before() -> None:
    async def body() -> None:
        await asyncio.sleep(0.25)
        with not_counted():
            await asyncio.sleep(0.5)
        await asyncio.sleep(30)

    async def main() -> None:
        assert not await ends_in_time(body, 0.375)
        assert asyncio.get_running_loop().time() == 0.25 + 0.5 + 0.125

    on_virtual_clock(main)


def test_a_deadline_around_another_stands_still_with_it() -> None:
    async def inner() -> None:
        with not_counted():
            await asyncio.sleep(0.5)

    async def outer() -> None:
        assert await ends_in_time(inner, 0.125)

    assert on_virtual_clock(lambda: ends_in_time(outer, 0.25))


async def test_without_a_deadline_a_wait_is_a_wait() -> None:
    with not_counted():
        await asyncio.sleep(0)
