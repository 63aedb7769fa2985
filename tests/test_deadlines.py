"""A deadline counts what its task does, not what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

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


async def test_what_takes_too_long_is_told() -> None:
    assert not await ends_in_time(lambda: asyncio.sleep(30), 0.05)
    assert await ends_in_time(lambda: asyncio.sleep(0.01), 20)


async def test_waits_do_not_count_also_of_tasks_below_that_overlap() -> None:
    async def wait(seconds: float) -> None:
        with not_counted():
            await asyncio.sleep(seconds)

    async def body() -> None:
        await asyncio.gather(wait(0.4), asyncio.create_task(wait(0.6)))

    assert await ends_in_time(body, 0.3)


async def test_what_comes_after_a_wait_counts_with_what_was_before() -> None:
    async def body() -> None:
        await asyncio.sleep(0.2)
        with not_counted():
            await asyncio.sleep(0.2)
        await asyncio.sleep(30)

    clock = asyncio.get_running_loop().time
    begin = clock()
    assert not await ends_in_time(body, 0.3)
    assert 0.45 < clock() - begin < 10


async def test_a_deadline_around_another_stands_still_with_it() -> None:
    async def inner() -> None:
        with not_counted():
            await asyncio.sleep(0.4)

    async def outer() -> None:
        assert await ends_in_time(inner, 0.2)

    assert await ends_in_time(outer, 0.3)


async def test_without_a_deadline_a_wait_is_a_wait() -> None:
    with not_counted():
        await asyncio.sleep(0)
