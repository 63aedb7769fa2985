"""rollout_ratio: tokens/s of vime's rollout loop ÷ those of the same requests posted straight to the same server.

vime's side is ``RolloutManager.generate``: sampling loop, tokenizer, runner, router, engine, decoding, metrics, the
file of samples, conversion to the training batch. Only grading is left out. The other side knows token ids and seeds
beforehand and posts them all at once to the engine. The prefix cache is emptied before each turn.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from bench.engine import running_engine
from bench.rollout import ROLLOUT_ID, Requests, make_manager, post_directly
from bench.stats import Comparison, Spread
from bench.work import demo_config, need_model
from vime.config import Config
from vime.serving.client import RouterClient
from vime.serving.control import EngineControl
from vime.serving.router import RouterServer

PAIRS = 4
RESPONSE = 64  # tokens
SHORT_RESPONSE = 8  # the demo's


def measure(folder: Path) -> dict[str, Any]:
    need_model()
    config = demo_config()
    with running_engine(config, folder) as url:
        return asyncio.run(_measure(config, url, folder))


async def _measure(config: Config, url: str, folder: Path) -> dict[str, Any]:
    router = RouterServer.from_config(config, log_dir=folder)
    client = RouterClient(await router.start([url]))
    try:
        result = await compare(config, client, url, RESPONSE, folder)
        return result | {"short_responses": await compare(config, client, url, SHORT_RESPONSE, folder)}
    finally:
        await client.close()
        router.stop()


async def compare(config: Config, client: RouterClient, url: str, response: int, folder: Path) -> dict[str, Any]:
    """Both sides by turns, ``PAIRS`` times after a warm-up of each."""
    requests = Requests(client)
    manager = make_manager(config, requests, response, folder)
    control = EngineControl(url)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await manager.generate(ROLLOUT_ID)
        bodies = list(requests.bodies)
        tokens = await post_directly(session, url, bodies)
        ours, theirs = [], []
        for _ in range(PAIRS):
            ours.append(tokens / await _seconds(control, manager.generate(ROLLOUT_ID)))
            theirs.append(tokens / await _seconds(control, post_directly(session, url, bodies)))
    await control.close()
    result = Comparison(Spread(tuple(ours)), Spread(tuple(theirs))).to_json(
        ours="vime", theirs="direct", unit="tokens/s"
    )
    return result | {"work": {"requests": len(bodies), "response": response, "tokens": tokens}}


async def _seconds(control: EngineControl, work: Any) -> float:
    """How long the work takes from an empty prefix cache."""
    await control.reset_prefix_cache()
    clock = asyncio.get_running_loop().time
    begin = clock()
    await work
    return clock() - begin
