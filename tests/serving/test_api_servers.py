"""An engine behind two API servers: a client cannot choose which of them takes a call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import psutil
import pytest

from tests.processes import command_of
from tests.serving.conftest import (
    SAMPLED,
    TOLERANCE,
    Sender,
    Served,
    changed,
    generating,
    largest_difference,
    reference,
)
from vime.serving import answers
from vime.serving.answers import GENERATE
from vime.serving.client import RouterClient, request_body
from vime.serving.control import EngineControl
from vime.types import Generation, SamplingParams

PROMPT = [7, 80, 90, 100, 110]
LONG = SamplingParams(max_tokens=480, temperature=1.0, seed=0, ignore_eos=True)
REQUESTS = 16


@pytest.fixture
def engine(untied_engine: Served) -> Served:
    return untied_engine


@pytest.fixture
async def control(engine: Served) -> AsyncIterator[EngineControl]:
    control = EngineControl(engine.url, "engine 0")
    yield control
    await control.close()


async def start_long(client: RouterClient, control: EngineControl) -> list[asyncio.Task[Generation]]:
    """Requests that run for a second or so, on connections of their own: both servers have some."""
    tasks = send_long(client)
    await generating(control.url, REQUESTS)
    return tasks


def send_long(client: RouterClient) -> list[asyncio.Task[Generation]]:
    return [asyncio.create_task(client.generate(PROMPT, LONG, session_id=f"s{i}")) for i in range(REQUESTS)]


def api_servers(engine: Served) -> list[psutil.Process]:
    tree = psutil.Process(engine.server.pid).children(recursive=True)
    return [process for process in tree if "APIServer" in command_of(process)]


async def test_requests_are_spread_over_both_and_an_abort_reaches_all_of_them(
    engine: Served, control: EngineControl
) -> None:
    servers = api_servers(engine)
    assert len(servers) == 2
    port = int(engine.url.rpartition(":")[2])
    client = RouterClient(engine.url, [control])
    tasks = await start_long(client, control)
    taken = [sum(c.laddr.port == port for c in p.net_connections() if c.status == "ESTABLISHED") for p in servers]
    assert min(taken) >= 1
    async with asyncio.timeout(10):
        await client.abort()
    assert {task.result().finish_reason for task in tasks} == {"abort"}
    await client.close()


async def test_aborting_everything_reaches_both(engine: Served, control: EngineControl) -> None:
    client = RouterClient(engine.url, [control])
    tasks = await start_long(client, control)
    await control.abort_all()
    async with asyncio.timeout(10):
        assert {(await task).finish_reason for task in tasks} == {"abort"}
    await client.close()


async def test_a_sync_through_one_is_a_sync_of_the_engine(engine: Served, control: EngineControl) -> None:
    """Requests in flight at both are kept, and go on under the new weights and their version."""
    client = RouterClient(engine.url, [control])
    tasks = await start_long(client, control)
    weights = changed(engine.weights, seed=3)
    version, _ = await Sender(engine.weights, control).send(weights)
    kept = [await task for task in tasks]
    assert {len(generation.token_ids) for generation in kept} == {LONG.max_tokens}
    assert all(generation.weight_versions[0] < version for generation in kept)
    assert {generation.weight_versions[-1] for generation in kept} == {version}
    later = await asyncio.gather(
        *(client.generate(PROMPT, replace(SAMPLED, seed=i), session_id=f"s{i}") for i in range(REQUESTS))
    )
    assert {v for generation in later for v in generation.weight_versions} == {version}
    expected = reference(engine.folder, weights, PROMPT, later[0].token_ids)
    assert largest_difference(later[0], expected) < TOLERANCE
    await client.close()


async def test_requests_to_an_engine_that_sleeps_wait_until_it_has_memory_for_keys_and_values(
    engine: Served, control: EngineControl
) -> None:
    """On a CPU a sleep takes no memory away, but vLLM's scheduler stops and goes on as it does on a GPU."""
    await control.sleep(2)
    client = RouterClient(engine.url, [control])
    tasks = send_long(client)
    await asyncio.sleep(0.3)  # most are there by then; those that come later are answered all the same
    weights = changed(engine.weights, seed=4)
    await control.wake_up("weights")
    version, report = await Sender(engine.weights, control).send(weights, asleep=True)
    assert "resume" not in report.steps_s
    assert await control.is_paused()
    assert not any(task.done() for task in tasks)
    await control.wake_up("kv_cache")  # nobody resumes it
    async with asyncio.timeout(60):
        generations = await asyncio.gather(*tasks)
    assert {each for generation in generations for each in generation.weight_versions} == {version}
    await client.close()


async def test_all_of_them_say_that_a_paused_engine_is_paused(engine: Served, control: EngineControl) -> None:
    await control.pause("keep")
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            said = await asyncio.gather(*(_json(session, f"{engine.url}/is_paused") for _ in range(REQUESTS)))
        assert said == [{"is_paused": True}] * REQUESTS
    finally:
        await control.resume()


async def _json(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as answer:
        return await answer.json()


@pytest.mark.parametrize(
    "change", [{"stream": True}, {"sampling_params": {"n": 2}}, {"sampling_params": {"logprobs": None}}]
)
async def test_what_a_compact_answer_cannot_hold_is_refused(engine: Served, change: dict[str, Any]) -> None:
    body = request_body(PROMPT, replace(SAMPLED, seed=0))
    body |= change | {"sampling_params": body["sampling_params"] | change.get("sampling_params", {})}
    asking = {"accept": answers.MEDIA_TYPE}
    async with (
        aiohttp.ClientSession() as session,
        session.post(engine.url + GENERATE, json=body, headers=asking) as said,
    ):
        assert said.status == 400
        assert "one whole response with log-probs" in await said.text()


async def test_whoever_does_not_ask_for_a_compact_answer_gets_vllms(engine: Served) -> None:
    body = request_body(PROMPT, replace(SAMPLED, seed=0))
    async with aiohttp.ClientSession() as session, session.post(engine.url + GENERATE, json=body) as answer:
        choice = (await answer.json())["choices"][0]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == SAMPLED.max_tokens
