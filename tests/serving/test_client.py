"""How the client deals with servers that fail, seen with a server that fails on purpose."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web

from vime.models.routes import RouteShape
from vime.serving import answers
from vime.serving import client as client_module
from vime.serving.client import EngineError, RouterClient, parse_generation, request_body, with_routes
from vime.serving.control import EngineControl
from vime.serving.fleet import Fleet
from vime.serving.http import Late
from vime.types import Generation, SamplingParams

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ANSWER = orjson.loads(
    answers.encode(
        [11, 12, 13],
        [-1.0, -2.0, -0.5],
        [{"version": "default", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}],
        "length",
    )
)
PARAMS = SamplingParams(max_tokens=3, seed=1)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vime.serving.http.BACKOFF_S", 0.001)


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Handler], Awaitable[RouterClient]]]:
    """Starts a server with the handler for generation requests and returns a client of it."""
    runners: list[web.AppRunner] = []
    clients: list[RouterClient] = []

    async def start(handler: Handler) -> RouterClient:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]
        clients.append(RouterClient(f"http://127.0.0.1:{port}", request_timeout_s=60))
        return clients[-1]

    yield start
    for each in clients:
        await each.close()
    for runner in runners:
        await runner.cleanup()


async def test_a_request_carries_its_session_and_every_sampling_parameter(serve: Callable) -> None:
    seen: dict[str, object] = {}

    async def handler(request: web.Request) -> web.Response:
        seen.update(await request.json(), session=request.headers["x-session-id"], accept=request.headers["accept"])
        return web.json_response(ANSWER)

    generation = await (await serve(handler)).generate([1, 2], PARAMS, session_id="abc")
    assert (generation.token_ids, generation.log_probs) == ([11, 12, 13], [-1.0, -2.0, -0.5])
    assert generation.weight_versions == [0, 4, 4]
    assert seen["session"] == "abc"
    assert seen["accept"] == answers.MEDIA_TYPE
    assert seen["token_ids"] == [1, 2]
    assert seen["sampling_params"] == {
        "max_tokens": 3,
        "min_tokens": 0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "stop": [],
        "stop_token_ids": [],
        "ignore_eos": False,
        "seed": 1,
        "logprobs": 0,
        "detokenize": False,
        "skip_special_tokens": True,
        "routed_experts_prompt_start": 2,  # the length of the prompt: no routes are wanted
    }


async def test_a_server_error_is_tried_again_with_the_same_seed(serve: Callable) -> None:
    seeds: list[int] = []

    async def handler(request: web.Request) -> web.Response:
        seeds.append((await request.json())["sampling_params"]["seed"])
        return web.json_response(ANSWER) if len(seeds) == 3 else web.json_response({"error": "busy"}, status=503)

    await (await serve(handler)).generate([1], PARAMS, session_id="a")
    assert seeds == [1, 1, 1]


async def test_after_four_attempts_the_last_error_is_told(serve: Callable) -> None:
    attempts = 0

    async def handler(_request: web.Request) -> web.Response:
        nonlocal attempts
        attempts += 1
        return web.Response(status=503, text="No available workers")

    with pytest.raises(
        EngineError, match=r"the router .* answered /inference/v1/generate with 503: No available workers"
    ):
        await (await serve(handler)).generate([1], PARAMS, session_id="a")
    assert attempts == 4


async def test_a_refused_request_is_not_repeated(serve: Callable) -> None:
    attempts = 0

    async def handler(_request: web.Request) -> web.Response:
        nonlocal attempts
        attempts += 1
        return web.json_response({"error": {"message": "prompt is too long"}}, status=400)

    with pytest.raises(EngineError, match="with 400: prompt is too long"):
        await (await serve(handler)).generate([1], PARAMS, session_id="a")
    assert attempts == 1


async def test_a_broken_connection_is_tried_again(serve: Callable) -> None:
    attempts = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            assert request.transport is not None
            request.transport.close()
        return web.json_response(ANSWER)

    assert (await (await serve(handler)).generate([1], PARAMS, session_id="a")).finish_reason == "length"
    assert attempts == 2


async def test_nobody_there_is_told_with_the_address() -> None:
    client = RouterClient("http://127.0.0.1:9")
    with pytest.raises(EngineError, match=r"the router \(http://127.0.0.1:9\) cannot be reached"):
        await client.generate([1], PARAMS, session_id="a")
    await client.close()


async def test_512_requests_are_in_flight_at_once(serve: Callable) -> None:
    waiting = 0
    all_here = asyncio.Event()

    async def handler(_request: web.Request) -> web.Response:
        nonlocal waiting
        waiting += 1
        if waiting == 512:
            all_here.set()
        await all_here.wait()
        return web.json_response(ANSWER)

    client = await serve(handler)
    answers = await asyncio.gather(*(client.generate([1], PARAMS, session_id=f"s{i}") for i in range(512)))
    assert len(answers) == 512


def packed(values: list[float], dtype: str = "<f4") -> str:
    return base64.b64encode(np.array(values, dtype).tobytes()).decode()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "cannot be read"),
        ({"choices": []}, "cannot be read"),  # vLLM's own answer
        (ANSWER | {"finish_reason": "error"}, "ended a request with 'error'"),
        (ANSWER | {"log_probs": packed([-1.0, float("nan"), -1.0])}, "without a finite log-prob"),
        (ANSWER | {"log_probs": packed([-1.0, -float("inf"), -1.0])}, "without a finite log-prob"),
        (ANSWER | {"log_probs": packed([-1.0])}, "without a finite log-prob"),
        (ANSWER | {"log_probs": "not base64"}, "cannot be read"),
        (ANSWER | {"token_ids": packed([1, 2, 3], "u1")}, "cannot be read"),
        (
            ANSWER | {"weight_versions": [{"version": "4", "start": 0, "end": 2}]},
            "weight versions of 2 tokens, not 3",
        ),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_an_error(answer: object, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        parse_generation(answer)


def test_an_answer_aborted_before_its_first_token_is_empty() -> None:
    generation = parse_generation(orjson.loads(answers.encode([], [], [], "abort")))
    assert (generation.token_ids, generation.weight_versions, generation.finish_reason) == ([], [], "abort")


def test_packed_numbers_are_the_engines_float32_and_any_token_id() -> None:
    log_probs = np.float32([-0.1, -1e-8, -87.3, -0.0]).tolist()
    ids = [0, 151_935, 2**31 - 1, 7]
    spans: list[answers.Span] = [{"version": "1", "start": 0, "end": 4}]
    generation = parse_generation(orjson.loads(answers.encode(ids, log_probs, spans, "stop")))
    assert generation.token_ids == ids
    assert generation.log_probs == log_probs  # bit by bit


def test_a_token_and_its_log_prob_take_11_bytes() -> None:
    spans: list[answers.Span] = [{"version": "12", "start": 0, "end": 512}]
    assert len(answers.encode(range(512), [-1.0] * 512, spans, "length")) / 512 < 11.0


def test_text_is_made_only_where_a_stop_text_needs_it() -> None:
    stopping = SamplingParams(max_tokens=1, stop=("\n",))
    assert request_body([1], stopping)["sampling_params"]["detokenize"] is True
    assert request_body([1], PARAMS)["sampling_params"]["detokenize"] is False


Served = tuple[RouterClient, Fleet, EngineControl]


@pytest.fixture
async def tolerant(serve: Callable) -> AsyncIterator[Callable[..., Awaitable[Served]]]:
    """A client in front of a fleet whose one engine serves, and takes aborts."""
    clients: list[RouterClient] = []

    async def start(handler: Handler, *, request_timeout_s: float = 5) -> Served:
        url = (await serve(handler))._router.url
        fleet = Fleet(tolerant=True)
        engine = EngineControl(url, "engine 0")
        fleet.started(0, engine)
        await fleet.admit(engine)
        clients.append(RouterClient(url, fleet, request_timeout_s=request_timeout_s))
        return clients[-1], fleet, engine

    yield start
    for each in clients:
        await each.close()
        await each._fleet.close()


async def answer_at_once(_request: web.Request) -> web.Response:
    return web.json_response(ANSWER)


async def test_requests_wait_for_an_engine_and_that_does_not_count_against_their_deadline(tolerant: Callable) -> None:
    client, fleet, engine = await tolerant(answer_at_once, request_timeout_s=2.0)
    fleet.lose(engine, "killed")
    request = asyncio.ensure_future(client.generate([1], PARAMS, session_id="a"))
    await asyncio.sleep(2.2)
    assert not request.done()
    restarted = EngineControl(engine.url, "engine 0")
    fleet.started(0, restarted)
    await asyncio.sleep(0.01)
    assert not request.done(), "it has not the weights yet"
    await fleet.admit(restarted)
    assert (await request).token_ids == [11, 12, 13]


async def test_requests_that_wait_for_an_engine_can_be_aborted(tolerant: Callable) -> None:
    client, fleet, engine = await tolerant(answer_at_once)
    fleet.lose(engine, "killed")
    request = asyncio.ensure_future(client.generate([1], PARAMS, session_id="a"))
    await asyncio.sleep(0)
    await client.abort()
    assert (request.result().token_ids, request.result().finish_reason) == ([], "abort")


async def test_a_request_that_fails_with_its_engine_is_counted_and_sent_to_another(tolerant: Callable) -> None:
    asked = 0

    async def handler(_request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(status=500, text="gone") if asked == 1 else web.json_response(ANSWER)

    client, fleet, _ = await tolerant(handler)
    assert (await client.generate([1], PARAMS, session_id="a")).token_ids == [11, 12, 13]
    assert fleet.taken_counts()["rollout/requests_repeated"] == 1


async def test_what_an_engine_aborts_by_itself_is_asked_for_again(tolerant: Callable) -> None:
    """An engine that is given up ends its requests; nobody wanted these halves."""
    asked = 0

    async def handler(_request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.json_response(ANSWER | {"finish_reason": "abort"} if asked == 1 else ANSWER)

    client, _, _ = await tolerant(handler)
    assert (await client.generate([1], PARAMS, session_id="a")).finish_reason == "length"


async def test_an_engine_that_dies_while_requests_are_aborted_keeps_nobody_waiting(tolerant: Callable) -> None:
    client: RouterClient

    async def handler(_request: web.Request) -> web.Response:
        while not client._aborts:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return web.Response(status=500, text="gone")

    client, fleet, engine = await tolerant(handler)
    request = asyncio.ensure_future(client.generate([1], PARAMS, session_id="a"))
    await asyncio.sleep(0.05)
    await client.abort()  # the server knows no /abort_requests: it answers with 404
    assert request.result().finish_reason == "abort"
    assert fleet.engines == [] and "/abort_requests" in str(engine.dead)


async def test_an_engine_that_hangs_when_it_is_told_to_abort_is_lost_before_the_abort_is_given_up(
    tolerant: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests then end with it. Time is short here: what counts is which of the deadlines comes first."""
    assert client_module.ABORT_CALL_TIMEOUT_S < client_module.ABORT_TIMEOUT_S / 2
    monkeypatch.setattr(client_module, "ABORT_CALL_TIMEOUT_S", 0.2)
    fleet: Fleet

    async def generate_until_lost(_request: web.Request) -> web.Response:
        while fleet.engines:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return web.Response(status=500, text="gone")

    client, fleet, engine = await tolerant(generate_until_lost)

    async def hang(path: str, body: object, *, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        raise Late(f"engine 0 did not answer {path} within {timeout_s:g} s")

    monkeypatch.setattr(engine, "_post", hang)
    request = asyncio.ensure_future(client.generate([1], PARAMS, session_id="a"))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(client.abort(), 5)
    assert request.result().finish_reason == "abort"
    assert engine.dead == "engine 0 did not answer /abort_requests within 0.2 s"


async def test_a_reply_that_is_lost_holds_no_abort_up_for_long(
    tolerant: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handler(_request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.json_response(ANSWER)

    monkeypatch.setattr(client_module, "ABORT_TIMEOUT_S", 0.3)
    client, _, _ = await tolerant(handler)
    request = asyncio.ensure_future(client.generate([1], PARAMS, session_id="a"))
    await asyncio.sleep(0.05)
    with pytest.raises(EngineError, match="1 requests did not end within"):
        await client.abort()
    request.cancel()


ROUTES = np.array([[[0, 0], [3, 1]], [[0, 0], [0, 7]], [[0, 0], [4, 2]]], np.uint8)  # two given tokens, two sampled
WANTED = SamplingParams(max_tokens=2, routed_experts_prompt_start=0)
ONE_MOE_LAYER = RouteShape(num_layers=2, layers=(1,), num_experts=8, top_k=2)


SPANS: list[answers.Span] = [{"version": "1", "start": 0, "end": 2}]


def body_with(routes: np.ndarray | None) -> bytes:
    """An answer with two tokens and these routes, as an engine writes it."""
    return answers.encode([11, 12], [-1.0, -2.0], SPANS, "stop", routes)


def read(body: bytes, params: SamplingParams, shape: RouteShape | None = None) -> Generation:
    answer = answers.decode(body)
    return with_routes(parse_generation(answer), answer, request_body([5, 6], params), shape)


def test_routes_are_those_of_layers_with_experts() -> None:
    routes = read(body_with(ROUTES), WANTED, ONE_MOE_LAYER).routed_experts
    assert routes is not None and routes.dtype == np.uint8
    assert routes.tolist() == [[[3, 1]], [[0, 7]], [[4, 2]]]
    later = read(body_with(ROUTES[1:]), replace(WANTED, routed_experts_prompt_start=1), ONE_MOE_LAYER).routed_experts
    assert later is not None and later.tolist() == [[[0, 7]], [[4, 2]]]
    assert np.array_equal(read(body_with(ROUTES), WANTED).routed_experts, ROUTES)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_routes_take_their_own_bytes_in_an_answer_and_are_read_in_place(dtype: type) -> None:
    routes = np.arange(400 * 48 * 8).reshape(400, 48, 8).astype(dtype)
    body = body_with(routes[:, ::2])  # a view, not contiguous
    assert len(body) < routes[:, ::2].nbytes + 300
    found = answers.decode(body)["routed_experts"]
    assert found.dtype == dtype and np.array_equal(found, routes[:, ::2])
    assert np.shares_memory(found, np.frombuffer(body, np.uint8))


def test_whoever_wants_no_routes_asks_for_those_behind_the_prompt() -> None:
    def start(params: SamplingParams) -> object:
        return request_body([5, 6], params)["sampling_params"]["routed_experts_prompt_start"]

    assert start(SamplingParams(max_tokens=2)) == 2
    assert start(WANTED) == 0


async def test_routes_that_nobody_wants_are_not_kept(serve: Callable) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body_with(ROUTES))

    generation = await (await serve(handler)).generate([5, 6], SamplingParams(max_tokens=2), session_id="a")
    assert generation.token_ids == [11, 12] and generation.routed_experts is None


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (None, "--use-rollout-routing-replay: an engine's answer has no routes, or not whole ones"),
        (ROUTES[:2], "told the routes of 2 tokens, and 3 were wanted"),
        (ROUTES[:, :, :1], r"have the shape \[3, 2, 1\]; those of 4 tokens have at most \[3, 1, 2\]"),
        (np.repeat(ROUTES, 2, axis=0), r"have the shape \[6, 2, 2\]"),
        (ROUTES + 3, "name expert 10; there are 8, from 0"),
        (ROUTES * 0, "send a token to the same expert twice"),  # what an engine tells of a layer without experts
        (ROUTES.astype(np.float32), "must be a numpy array of integers"),
    ],
)
def test_an_answer_without_the_routes_that_were_wanted_is_an_error(routes: np.ndarray | None, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read(body_with(routes), WANTED, ONE_MOE_LAYER)


@pytest.mark.parametrize("body", [body_with(ROUTES)[:-1], body_with(ROUTES) + b"0", body_with(ROUTES).split(b"\n")[0]])
def test_routes_that_broke_off_are_not_read(body: bytes) -> None:
    with pytest.raises(EngineError, match="no routes, or not whole ones"):
        read(body, WANTED)


async def test_a_client_hands_out_routes(serve: Callable) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body_with(ROUTES))

    generation = await (await serve(handler)).generate([5, 6], WANTED, session_id="a")
    assert np.array_equal(generation.routed_experts, ROUTES)


async def test_wrong_routes_are_reported_with_their_request_and_session(serve: Callable) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body_with(ROUTES[:2]))

    message = (
        r"the router \(http.*\), request vime-\w+-0 of session abc: --use-rollout-routing-replay: an engine told the "
        "routes of 2 tokens, and 3 were wanted"
    )
    with pytest.raises(EngineError, match=message):
        await (await serve(handler)).generate([5, 6], WANTED, session_id="abc")


async def test_others_go_on_while_routes_are_looked_at(serve: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is held up until something has happened in the event loop."""
    loop, something_happened = asyncio.get_running_loop(), threading.Event()

    class Slow(RouteShape):
        def checked(self, routes: Any, tokens: int) -> np.ndarray:
            loop.call_soon_threadsafe(something_happened.set)
            assert something_happened.wait(5)
            return super().checked(routes, tokens)

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body_with(ROUTES))

    client = await serve(handler)
    monkeypatch.setattr(client, "_routes", Slow(num_layers=2, layers=(1,), num_experts=8, top_k=2))
    generation = await client.generate([5, 6], WANTED, session_id="a")
    assert generation.routed_experts.tolist() == ROUTES[:, 1:].tolist()
