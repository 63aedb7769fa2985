"""Notices that a server is gone, and ends the run with its last words instead of with a request that got no answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

from vime.serving.http import EngineError

PERIOD_S = 2.0

Failures = Callable[[], Awaitable[list[str]]]
"""One line for each server that is gone."""


async def supervised(work: Coroutine[Any, Any, None], failures: Failures) -> None:
    """Runs ``work`` while watching the servers.

    Raises:
        EngineError: a server is gone, and ``work`` was cancelled or has failed of it. The causes come last.
    """
    running = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_watch(failures))
    try:
        done, _ = await asyncio.wait({running, watch}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    except EngineError as error:
        causes = [cause for cause in await failures() if cause not in str(error)]
        raise EngineError("\n".join([str(error), *causes])) from None
    finally:
        running.cancel()
        watch.cancel()
        await asyncio.gather(running, watch, return_exceptions=True)


async def _watch(failures: Failures) -> NoReturn:
    while True:
        found = await failures()
        if found:
            raise EngineError("\n".join(found))
        await asyncio.sleep(PERIOD_S)
