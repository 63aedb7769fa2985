"""The HTTP side: ``/v1/chat/completions`` and ``/v1/models`` of every open session.

An agent is told its session by the base URL, ``http://HOST:PORT/session/ID/v1``, or by the API key with the base URL
``http://HOST:PORT/v1``. Session ids are secrets, so nobody else speaks in the name of a sample.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from vime.errors import UserError
from vime.rollout.multi_turn.tool_calls import UNREADABLE
from vime.rollout.openai_endpoint.protocol import Answer, ChatRequest, Refused, read_request, whole_characters
from vime.rollout.openai_endpoint.session import Session, Speaker
from vime.types import SamplingParams

logger = logging.getLogger(__name__)

MODEL = "vime"
"""The name that ``/v1/models`` gives the model; requests may give any."""

MAX_TRANSCRIPTS = 64
"""Of a session, unless more are allowed."""


def check_address(host: str, port: int) -> None:
    """Finds out whether an endpoint could listen there now.

    Raises:
        UserError: it could not.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except (OSError, ValueError, OverflowError) as error:  # ValueError: a host that is no name
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"--agent-host {host} --agent-port {port}: the endpoint of agents cannot listen there: {reason}; give "
            "another port, or 0 for any"
        ) from error


class Endpoint:
    """Serves while at least one session is open.

    Args:
        host: where to listen. Beyond loopback everybody who knows a session's id may use it.
        port: 0 for any that is free.
        advertise: the address that agents are told; None: the host, or of this machine's addresses the one by which it
            reaches others, where the host stands for all of them.
        ignores_sampling: requests that ask for another temperature, top_p or top_k than the run's are answered with
            the run's instead of refused.
    """

    def __init__(
        self,
        speaker: Speaker,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        ignores_sampling: bool = False,
    ) -> None:
        self._speaker = speaker
        self._host, self._port, self._advertise = host, port, advertise
        self._ignores_sampling = ignores_sampling
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._address = ""
        self._users = 0
        self._changing = asyncio.Lock()

    @asynccontextmanager
    async def session(
        self, params: SamplingParams, session_id: str, *, max_context: int, max_transcripts: int = MAX_TRANSCRIPTS
    ) -> AsyncIterator[Session]:
        """A session that is open within the block, see ``Session``. The first one starts the server, the last one stops
        it."""
        session = Session(
            self._speaker,
            secrets.token_hex(16),
            params,
            session_id,
            max_context=max_context,
            max_transcripts=max_transcripts,
        )
        async with self._changing:
            if self._runner is None:
                await self._start()
            self._users += 1
        self._sessions[session.id] = session
        try:
            yield session
        finally:
            del self._sessions[session.id]
            async with self._changing:
                self._users -= 1
                if self._users == 0:
                    await self._stop()

    def base_url(self, session: Session) -> str:
        """What an OpenAI client takes as its base URL; any API key will do."""
        return f"{self._address}/session/{session.id}/v1"

    async def _start(self) -> None:
        app = web.Application(middlewares=[_errors])
        for prefix in ("", "/session/{session}"):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._chat)
            app.router.add_get(f"{prefix}/v1/models", self._models)
        runner = web.AppRunner(  # what a client that hung up would have been told is not recorded
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
        except OSError:
            await runner.cleanup()
            raise
        host, port = runner.addresses[0][:2]
        host = self._advertise or (_own_address(host) if ipaddress.ip_address(host).is_unspecified else host)
        self._address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._runner = runner

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _session_of(self, request: web.Request) -> Session:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        identity = request.match_info.get("session", key)
        if identity not in self._sessions:
            raise Refused(
                "there is no such session, or it has ended: use the base URL that the agent was given, or the session "
                "as API key",
                status=401,
                code="invalid_api_key",
            )
        return self._sessions[identity]

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        try:
            sent = await request.clone(client_max_size=session.max_body_bytes).read()
            body = whole_characters(json.loads(sent))
        except web.HTTPRequestEntityTooLarge as error:
            raise session.body_refused() from error
        except UNREADABLE as error:
            raise Refused(f"the body of the request is not JSON: {error}") from error
        wanted = read_request(body, session.params, ignores_sampling=self._ignores_sampling)
        answer = await session.chat(wanted)
        return await _streamed(request, answer, wanted) if wanted.stream else web.json_response(answer.body())

    async def _models(self, request: web.Request) -> web.Response:
        self._session_of(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "vime"}
        return web.json_response({"object": "list", "data": [model]})


def _own_address(every: str) -> str:
    """Of this machine, in the family of the address that stands for all of them. Nothing is sent to find it."""
    family, elsewhere = (socket.AF_INET6, "2001:db8::1") if ":" in every else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((elsewhere, 9))  # an address of documentation: RFC 5737, RFC 3849
        except OSError:  # there is no way out
            return "::1" if ":" in every else "127.0.0.1"
        address: str = probe.getsockname()[0]
    return address


async def _streamed(request: web.Request, answer: Answer, wanted: ChatRequest) -> web.StreamResponse:
    """Server-sent events. The answer is complete when they begin, because engines answer whole turns."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for chunk in answer.chunks(include_usage=wanted.include_usage):
        await response.write(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Errors as the API writes them."""
    try:
        return await handler(request)
    except Refused as error:
        return web.json_response(error.body(), status=error.status)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        refused = f"there is no {request.method} {request.path} here, only chat/completions and models"
        return web.json_response(Refused(refused, status=error.status).body(), status=error.status)
    except web.HTTPException as error:
        return web.json_response(Refused(error.reason, status=error.status).body(), status=error.status)
    except ConnectionError:  # nobody is there to be told
        raise
    except Exception as error:
        logger.exception("a request of an agent failed")
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return web.json_response(Refused(told, status=500).body(), status=500)
