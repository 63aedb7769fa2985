"""HTTP with deadlines and with errors that say who did not do what. One connection pool an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import orjson

from vime.errors import EngineError as EngineError

Read = Callable[[bytes], Any]

SHOWN_BYTES = 500  # of an unexpected answer
ATTEMPTS = 4
BACKOFF_S = 0.5  # before the second attempt; doubles for each further one


class Unreachable(EngineError):
    """Nobody answered: the connection could not be made or broke."""


class Late(EngineError):
    """There was no answer in time."""


class Refused(EngineError):
    """An answer with an error status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def is_final(error: EngineError, attempt: int) -> bool:
    """Whether a request that failed so is not sent once more: it was the last one, or the request is wrong."""
    return attempt == ATTEMPTS or (isinstance(error, Refused) and error.status < 500)


async def back_off(attempt: int) -> None:
    """Waits after a failed attempt; the first is 1."""
    await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))


class HttpServer:
    """The client's side of one server.

    Args:
        name: how messages call it, e.g. "engine 3".
        url: "http://host:port".
    """

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.url})"

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        read: Read | None = None,
    ) -> Any:
        """Sends one request and returns the JSON of the answer, or its text if it is not JSON, or None if it is empty.

        Args:
            read: reads an answer that is something else.

        Raises:
            Unreachable: no connection.
            Refused: an error status; the message ends with the server's own words.
            Late: no answer within ``timeout_s``.
        """
        payload = None if body is None else orjson.dumps(body)
        sent = {"Content-Type": "application/json", **(headers or {})}
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._pool().request(method, self.url + path, data=payload, headers=sent) as answer,
            ):
                content = await answer.read()
        except TimeoutError:
            raise Late(f"{self} did not answer {path} within {timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            raise Unreachable(f"{self} cannot be reached for {path}: {error or type(error).__name__}") from None
        if answer.status >= 400:
            raise Refused(f"{self} answered {path} with {answer.status}: {_reason(content)}", answer.status)
        return (read or _parsed)(content)

    def _pool(self) -> aiohttp.ClientSession:
        """The session, made in the running event loop; as many connections as there are calls, idle ones are reused."""
        if self._session is None or self._session.closed:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _parsed(content: bytes) -> Any:
    try:
        return orjson.loads(content) if content else None
    except orjson.JSONDecodeError:
        return content.decode(errors="replace")


def _reason(content: bytes) -> str:
    """The message within an error answer; servers wrap it in different ways."""
    answer = _parsed(content)
    for key in ("error", "message", "detail"):
        while isinstance(answer, dict) and key in answer:
            answer = answer[key]
    return str(answer)[:SHOWN_BYTES]
