"""What runs inside vLLM's API servers: compact answers, aborts that reach every API server of an engine, and a pause
that does not dawdle.

Written for vLLM 0.32; ``tests/serving`` fails where a later version no longer fits.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any

import numpy as np
import orjson
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import validate_json_request, with_cancellation
from vllm.logger import init_logger
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine import PauseMode

from vime.serving import answers
from vime.serving.guard import die_with_parent

COMPACT = "/vime/v1/generate"  # where the middleware leads requests for compact answers; routers know the other path
PAUSE = "/pause"
ABORTS = {"/abort_requests": True, "/inference/v1/abort_requests": False}  # whether no ids mean all requests
CREDENTIALS = struct.Struct("3i")  # pid, uid and gid of who sent a datagram, by the kernel
IDS_A_MESSAGE = 1000  # about 50 kB; a datagram may hold 200

logger = init_logger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class CompactAnswers:
    """ASGI middleware, once in each API server process of an engine."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._peers: Peers | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self._start(scope["app"])
        elif scope["type"] == "http" and scope["path"] == answers.GENERATE and _accepts_compact(scope):
            scope["path"] = COMPACT
        elif scope["type"] == "http" and scope["path"] in ABORTS and self._peers is not None:
            receive = await self._peers.overhear(receive, ABORTS[scope["path"]])
        await self._app(scope, receive, send)

    def _start(self, app: FastAPI) -> None:
        """Called when vLLM has put together its app and is about to serve it."""
        gc.freeze()  # 650,000 objects of imports: a collection that went through them would hold up every request
        state = app.state
        state.compact_tokens = CompactTokens(
            state.engine_client,
            state.openai_serving_models,
            state.online_renderer,
            request_logger=state.serving_tokens.request_logger,
        )
        app.router.routes[:0] = [
            APIRoute(COMPACT, generate, methods=["POST"], dependencies=[Depends(validate_json_request)]),
            APIRoute(answers.PROGRESS, progress, methods=["GET"]),
            APIRoute(PAUSE, pause, methods=["POST"]),
        ]
        args = state.args
        if (args.api_server_count or 1) > 1:
            self._peers = Peers(f"{args.host}:{args.port}", args.api_server_count, state.engine_client)


def _accepts_compact(scope: Message) -> bool:
    return any(name == b"accept" and value == answers.MEDIA_TYPE.encode() for name, value in scope["headers"])


class CompactTokens(ServingTokens):  # type: ignore[misc]
    """vLLM's handler of token requests, which takes, checks and runs them as ever, and answers in our way."""

    finished = 0

    async def serve_tokens(self, request: GenerateRequest, raw_request: Request | None = None) -> bytes | ErrorResponse:
        params = request.sampling_params
        if request.stream or params.n != 1 or params.logprobs is None:
            return self.create_error_response(f"{answers.MEDIA_TYPE} is for one whole response with log-probs")
        params.flat_logprobs = True  # plain lists instead of a dict and an object a token
        return await super().serve_tokens(request, raw_request)

    async def serve_tokens_full_generator(
        self, request: GenerateRequest, result_generator: AsyncGenerator[RequestOutput, None], request_id: str, *_: Any
    ) -> bytes | ErrorResponse:
        """The answer, as soon as the response is whole."""
        try:
            results = [result async for result in result_generator]  # one, because the response is not streamed
        except asyncio.CancelledError:
            return self.create_error_response("Client disconnected")
        output = results[-1].outputs[0]
        self._raise_if_error(output.finish_reason, request_id)
        self.finished += output.finish_reason != "abort"
        wanted = request.sampling_params.routed_experts_prompt_start < len(request.token_ids)
        return encoded(output, routes=wanted)


def encoded(output: CompletionOutput, *, routes: bool) -> bytes:
    """A finished response as the body of an answer, with its routes if they are wanted and there are any."""
    log_probs = output.logprobs
    assert isinstance(log_probs, FlatLogprobs)
    spans: list[answers.Span] = [
        {"version": span.version, "start": span.start, "end": span.end} for span in output.weight_versions or ()
    ]
    return answers.encode(
        output.token_ids,
        np.asarray(log_probs.logprobs, answers.LOG_PROB_DTYPE)[log_probs.start_indices],  # the sampled token's is first
        spans,
        output.finish_reason or "stop",
        output.routed_experts if routes else None,
    )


@with_cancellation  # type: ignore[untyped-decorator]
async def generate(request: GenerateRequest, raw_request: Request) -> Response:
    """vLLM's route for token requests, with another end."""
    answer = await raw_request.app.state.compact_tokens.serve_tokens(request, raw_request)
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), status_code=answer.error.code)
    return Response(answer, media_type=answers.MEDIA_TYPE)


async def progress(raw_request: Request) -> JSONResponse:
    """How far the requests of this API server are; see ``serving.health.Progress``."""
    state = raw_request.app.state
    running = state.engine_client.output_processor.request_states
    tokens = {name: each.detokenizer.num_output_tokens() for name, each in running.items() if each.detokenizer}
    return JSONResponse({"server": os.getpid(), "finished": state.compact_tokens.finished, "running": tokens})


async def pause(raw_request: Request, mode: PauseMode = "abort", clear_cache: bool = True) -> JSONResponse:
    """vLLM's route; with "keep" without the 20 ms that ``AsyncLLM.pause_generation`` sleeps when all is done, so that
    answers which are on their way come before its own. Every engine stood still for that long in every sync."""
    engine = raw_request.app.state.engine_client
    try:
        if mode != "keep":
            await engine.pause_generation(mode=mode, clear_cache=clear_cache)
        else:
            if clear_cache:
                await engine.renderer.clear_mm_cache_async()
            await engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)
    except ValueError as error:
        return JSONResponse({"error": str(error)}, HTTPStatus.BAD_REQUEST)
    except Exception as error:  # as vLLM's route does: whoever asks is told, whatever it was
        logger.exception("Failed to pause generation")
        return JSONResponse({"error": f"Failed to pause generation: {error}"}, HTTPStatus.INTERNAL_SERVER_ERROR)
    return JSONResponse({"status": "paused"})


class Peers:
    """The API servers of one engine, for what only one of them is told and all must do.

    Pausing, sleeping and weight versions are matters of the engine core, whichever server is asked. But a request is
    known to the one server that took it, and a client cannot choose which of them it talks to. So whoever is asked to
    abort requests passes their ids on to the others, by datagrams: names of sockets derive from the engine's address.

    Args:
        address: the engine's, as all its API servers know it.
        count: how many API servers there are.
    """

    def __init__(self, address: str, count: int, engine: Any) -> None:
        self._engine = engine
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # anybody on this machine can send to it
        names = [f"\0vime {address} {number}" for number in range(count)]
        own = next(name for name in names if _bound(self._socket, name))
        self._others = [name for name in names if name != own]
        self._tasks: set[asyncio.Task[None]] = set()
        asyncio.get_running_loop().add_reader(self._socket, self._hear)

    async def overhear(self, receive: Receive, none_means_all: bool) -> Receive:
        """Reads a request to abort and passes it on; returns what reads it once more.

        One that vLLM will refuse, or that broke off, is not passed on.
        """
        messages: list[Message] = []
        while not messages or messages[-1].get("more_body", False):
            messages.append(await receive())
        ids = _request_ids(b"".join(message.get("body", b"") for message in messages))
        if ids is not None and (ids or none_means_all) and messages[-1]["type"] == "http.request":
            self._tell(ids)
        read = iter(messages)

        async def again() -> Message:
            return next(read, None) or await receive()

        return again

    def _tell(self, request_ids: Sequence[str]) -> None:
        parts = [request_ids[i : i + IDS_A_MESSAGE] for i in range(0, len(request_ids), IDS_A_MESSAGE)]
        for name in self._others:
            for part in parts or [[]]:
                with contextlib.suppress(OSError):  # a server which is not there has no requests
                    self._socket.sendto(orjson.dumps(part), name)

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                data, sender, _, _ = self._socket.recvmsg(1 << 18, socket.CMSG_SPACE(CREDENTIALS.size))
                if not any(CREDENTIALS.unpack(found)[1] == os.getuid() for _, _, found in sender):
                    continue
                task = asyncio.ensure_future(self._abort(orjson.loads(data)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _abort(self, request_ids: list[str]) -> None:
        """Aborts these requests, or without ids all that this server has, as vLLM's own route does."""
        if request_ids:
            await self._engine.abort(request_ids)
        else:
            await self._engine.abort(list(self._engine.output_processor.request_states), internal=True)


def _request_ids(body: bytes) -> list[str] | None:
    """The ids in the body of a request to abort, [] for all requests; None where vLLM refuses the body."""
    if not body:
        return []
    try:
        read = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    ids = (read.get("request_ids") or []) if isinstance(read, dict) else None
    return ids if isinstance(ids, list) and all(isinstance(each, str) for each in ids) else None


def _bound(server: socket.socket, name: str) -> bool:
    try:
        server.bind(name)
    except OSError:
        return False
    return True


die_with_parent()  # an API server that is one of several would outlive the process that started them
