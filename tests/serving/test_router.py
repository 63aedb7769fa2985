"""The real router, in front of servers that answer like engines and say who they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from aiohttp import web

from vime.errors import UserError
from vime.models.routes import RouteShape
from vime.serving import answers
from vime.serving.client import RouterClient
from vime.serving.http import EngineError, HttpServer, Refused
from vime.serving.router import RouterServer
from vime.types import SamplingParams

PARAMS = SamplingParams(max_tokens=1)


def routes_of(tokens: int) -> np.ndarray:
    """48 layers, 8 of 128 experts; all numbers that a byte may be."""
    first = np.arange(tokens * 48).reshape(tokens, 48, 1) % 128
    return ((first + 16 * np.arange(8)) % 128).astype(np.uint8)


async def start_engine(number: int, seconds: float = 0.0, host: str = "127.0.0.1") -> tuple[web.AppRunner, str]:
    """Answers every request with its number as the token, after so many seconds, and with routes that are wanted."""

    async def generate(request: web.Request) -> web.Response:
        await asyncio.sleep(seconds)
        asked = await request.json()
        tokens = len(asked["token_ids"]) - asked["sampling_params"]["routed_experts_prompt_start"]
        routes = routes_of(tokens) if tokens else None
        body = answers.encode([number], [-1.0], [{"version": "1", "start": 0, "end": 1}], "length", routes)
        return web.Response(body=body, content_type=answers.MEDIA_TYPE)

    async def health(_request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    return runner, await serve_on(host, runner)


async def serve_on(host: str, runner: web.AppRunner) -> str:
    site = web.TCPSite(runner, host, 0)
    await site.start()
    assert site._server is not None
    return f"http://{host}:{site._server.sockets[0].getsockname()[1]}"


@pytest.fixture
async def engines() -> AsyncIterator[list[str]]:
    started = [await start_engine(number) for number in range(3)]
    yield [url for _, url in started]
    for runner, _ in started:
        await runner.cleanup()


@pytest.fixture
async def slow_engines() -> AsyncIterator[list[str]]:
    started = [await start_engine(number, 0.5) for number in range(3)]
    yield [url for _, url in started]
    for runner, _ in started:
        await runner.cleanup()


async def who_answers_at_once(url: str, count: int) -> list[int]:
    """Equal prompts of one session. When the first is answered the others are sent, each a moment after the one before
    and long before that is answered."""
    client = RouterClient(url, request_timeout_s=30)

    async def ask(number: int) -> int:
        await asyncio.sleep(0.01 * number)
        return (await client.generate([1, 2, 3] * 20, PARAMS, session_id="one")).token_ids[0]

    try:
        return [await ask(0), *await asyncio.gather(*map(ask, range(count - 1)))]
    finally:
        await client.close()


async def who_answers(url: str, sessions: list[str]) -> list[int]:
    client = RouterClient(url, request_timeout_s=30)
    try:
        answers = [await client.generate([1], PARAMS, session_id=session) for session in sessions]
        return [answer.token_ids[0] for answer in answers]
    finally:
        await client.close()


async def test_a_session_stays_on_one_engine_and_sessions_spread_over_all(engines: list[str], tmp_path: Path) -> None:
    router = RouterServer(log_dir=tmp_path)
    url = await router.start(engines)
    try:
        answers = await who_answers(url, [f"session-{i % 40}" for i in range(120)])
        assert answers[:40] == answers[40:80] == answers[80:]
        assert set(answers) == {0, 1, 2}
    finally:
        router.stop()


async def test_routes_of_a_long_text_pass_unchanged(engines: list[str], tmp_path: Path) -> None:
    """12 MB of them, with line feeds and nulls and what is no text."""
    router = RouterServer(log_dir=tmp_path)
    shape = RouteShape(num_layers=48, layers=tuple(range(48)), num_experts=128, top_k=8)
    client = RouterClient(await router.start(engines), request_timeout_s=30, routes=shape)
    try:
        wanted = replace(PARAMS, routed_experts_prompt_start=0)
        generation = await client.generate([1] * 32_000, wanted, session_id="one")
        assert np.array_equal(generation.routed_experts, routes_of(32_000))
    finally:
        await client.close()
        router.stop()


async def test_flags_of_the_user_win(engines: list[str], tmp_path: Path) -> None:
    router = RouterServer(flags={"policy": "round_robin"}, log_dir=tmp_path)
    url = await router.start(engines)
    try:
        assert sorted(await who_answers(url, ["same"] * 6)) == [0, 0, 1, 1, 2, 2]
    finally:
        router.stop()


@pytest.mark.parametrize(
    ("flags", "engines_used"),
    [
        ({}, 1),  # consistent_hash
        ({"balance_abs_threshold": 0}, 1),
        ({"policy": "sticky_least_loaded", "balance_abs_threshold": 0}, 1),
        ({"policy": "cache_aware"}, 1),
        ({"policy": "cache_aware", "balance_abs_threshold": 0}, 3),
    ],
)
async def test_the_threshold_of_balance_has_an_effect_with_cache_aware_alone(
    slow_engines: list[str], tmp_path: Path, flags: dict[str, Any], engines_used: int
) -> None:
    """As the table of docs/en/advanced/engines.md has it."""
    router = RouterServer(flags=flags, log_dir=tmp_path)
    url = await router.start(slow_engines)
    try:
        assert len(set(await who_answers_at_once(url, 12))) == engines_used
    finally:
        router.stop()


async def test_sticky_sessions_go_to_the_engine_with_the_fewest(engines: list[str], tmp_path: Path) -> None:
    router = RouterServer(flags={"policy": "sticky_least_loaded"}, log_dir=tmp_path)
    url = await router.start(engines)
    try:
        answers = await who_answers(url, [f"s{i % 6}" for i in range(18)])
        assert answers[:6] == answers[6:12] == answers[12:]
        assert {answers[:6].count(engine) for engine in range(3)} == {2}
    finally:
        router.stop()


async def test_a_router_that_runs_already_is_told_of_the_engines_and_later_to_forget_them(
    engines: list[str], tmp_path: Path
) -> None:
    running = RouterServer(log_dir=tmp_path)
    url = await running.start(engines[:1])
    host, _, port = url.removeprefix("http://").partition(":")
    ours = RouterServer(external=(host, int(port)), log_dir=tmp_path)
    try:
        assert await ours.start(engines[1:]) == url
        assert set(await who_answers(url, [f"s{i}" for i in range(40)])) == {0, 1, 2}
        await asyncio.to_thread(ours.stop)
        assert set(await who_answers(url, [f"s{i}" for i in range(40)])) == {0}
    finally:
        running.stop()


async def test_an_external_router_that_is_not_there_is_an_error(engines: list[str], tmp_path: Path) -> None:
    router = RouterServer(external=("127.0.0.1", 9), log_dir=tmp_path)
    with pytest.raises(EngineError, match=r"the router \(http://127.0.0.1:9\) cannot be reached"):
        await router.start(engines)


async def test_a_wrong_flag_is_told_in_the_routers_own_words(engines: list[str], tmp_path: Path) -> None:
    router = RouterServer(flags={"policy": "nonsense"}, log_dir=tmp_path)
    with pytest.raises(EngineError, match=r"the router ended with status 2: .*error: .*nonsense"):
        await router.start(engines)


async def test_a_port_in_use_is_named(engines: list[str], tmp_path: Path) -> None:
    port = int(engines[0].rpartition(":")[2])
    with pytest.raises(UserError, match=f"--vllm-router-port: port {port} of 127.0.0.1 cannot be used"):
        await RouterServer(port=port, log_dir=tmp_path).start(engines)


async def test_a_stopped_router_is_gone(engines: list[str], tmp_path: Path) -> None:
    router = RouterServer(log_dir=tmp_path)
    url = await router.start(engines)
    assert router.failure() is None
    assert router._process is not None
    tree = psutil.Process(router._process.pid).children(recursive=True)
    await asyncio.to_thread(router.stop)
    assert not any(process.is_running() for process in tree)
    server = HttpServer("the router", url)
    with pytest.raises(EngineError, match="cannot be reached"):
        await server.call("GET", "/health", timeout_s=5)
    await server.close()


async def test_engines_come_and_go_while_the_router_runs(engines: list[str], tmp_path: Path) -> None:
    router = RouterServer(log_dir=tmp_path)
    url = await router.start(engines[:2])
    sessions = [f"s{i}" for i in range(40)]
    try:
        await router.remove(engines[0])
        await router.remove(engines[0])
        assert set(await who_answers(url, sessions)) == {1}
        await router.add(engines[2])
        await router.add(engines[2])
        assert set(await who_answers(url, sessions)) == {1, 2}
    finally:
        router.stop()


async def test_a_killed_router_is_restarted_on_its_port_with_the_engines_that_are_left(
    engines: list[str], tmp_path: Path
) -> None:
    router = RouterServer(log_dir=tmp_path)
    url = await router.start(engines)
    try:
        await router.remove(engines[1])
        assert router._process is not None
        ended = asyncio.ensure_future(router.ended())
        psutil.Process(router._process.pid).children()[0].kill()
        assert "the router ended with status 137" in await asyncio.wait_for(ended, 5)
        assert await router.restart() == []
        assert router.url == url
        assert set(await who_answers(url, [f"s{i}" for i in range(40)])) == {0, 2}
    finally:
        router.stop()


async def test_a_router_that_hangs_fails_its_check_and_is_restarted(engines: list[str], tmp_path: Path) -> None:
    router = RouterServer(log_dir=tmp_path)
    url = await router.start(engines)
    try:
        await router.check(30)
        assert router._process is not None
        psutil.Process(router._process.pid).children()[0].suspend()
        with pytest.raises(EngineError, match=r"the router .* did not answer /workers within 0.5 s"):
            await router.check(0.5)
        assert router.failure() is None, "its process lives"
        assert await router.restart() == []
        await router.check(30)
        assert set(await who_answers(url, [f"s{i}" for i in range(40)])) == {0, 1, 2}
    finally:
        router.stop()


async def test_an_engine_that_comes_back_after_a_restart_of_the_router_is_not_reached_through_a_proxy(
    engines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on another host, and was lost when the router was."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    runner, elsewhere = await start_engine(7, host="127.0.0.2")
    router = RouterServer(log_dir=tmp_path)
    url = await router.start([engines[0], elsewhere])
    try:
        await router.remove(elsewhere)
        assert await router.restart() == []
        await router.add(elsewhere)
        assert set(await who_answers(url, [f"s{i}" for i in range(40)])) == {0, 7}
    finally:
        router.stop()
        await runner.cleanup()


async def test_an_external_router_that_does_not_take_an_engine_in_time_is_an_error(
    engines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(_request: web.Request) -> web.Response:
        return web.json_response({"workers": []})

    async def hang(_request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    app = web.Application()
    app.router.add_get("/workers", none)
    app.router.add_post("/workers", hang)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    host, _, port = (await serve_on("127.0.0.1", runner)).removeprefix("http://").partition(":")
    monkeypatch.setattr("vime.serving.router.START_TIMEOUT_S", 0.3)
    with pytest.raises(EngineError, match=f"the router .* did not find these engines healthy: {engines[0]}"):
        await RouterServer(external=(host, int(port)), log_dir=tmp_path).start(engines[:1])
    await runner.cleanup()


async def test_requests_of_an_engine_that_is_gone_fail_at_once_where_failures_are_reported(
    engines: list[str], tmp_path: Path
) -> None:
    router = RouterServer(log_dir=tmp_path, reports_failures=True)
    runner, doomed = await start_engine(7)
    url = await router.start([doomed])
    server = HttpServer("the router", url)
    try:
        await runner.cleanup()
        with pytest.raises(Refused, match="with 500: Request failed") as caught:
            await server.call("POST", "/inference/v1/generate", {"token_ids": [1]}, timeout_s=5)
        assert caught.value.status == 500
    finally:
        await server.close()
        router.stop()
