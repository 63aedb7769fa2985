"""A reward service: POST {"prompt", "response", "label"} as JSON, the answer is a number (or an object of values).

Connection errors and 5xx answers are tried again with growing pauses; a 4xx answer says that the request is wrong,
which no repetition mends. Whatever ends without a number is a Grade with status ERROR.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from vime.rewards.values import RewardFailed

if TYPE_CHECKING:
    import aiohttp

MAX_BACKOFF_S = 30.0
HEADERS = {"Content-Type": "application/json"}


class RemoteReward:
    """A client of one reward service. Close it at the end.

    Args:
        url: where to POST.
        tries: how often one request is sent at most.
        timeout_s: deadline of one try.
        backoff_s: pause before the second try; it doubles each time, up to ``MAX_BACKOFF_S``.
    """

    def __init__(self, url: str, *, tries: int = 10, timeout_s: float = 120.0, backoff_s: float = 0.5) -> None:
        self._url = url
        self._tries = tries
        self._timeout_s = timeout_s
        self._backoff_s = backoff_s
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, prompt: Any, response: str, label: str | None) -> Any:
        """What the service answered, as decoded JSON.

        Raises:
            RewardFailed: it did not, or not with JSON.
        """
        try:
            body = json.dumps({"prompt": prompt, "response": response, "label": label}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RewardFailed(
                self._line(f"cannot be asked: the prompt is nothing that JSON can hold: {error}")
            ) from None
        failure = ""
        for attempt in range(self._tries):
            if attempt:
                await asyncio.sleep(min(self._backoff_s * 2 ** (attempt - 1), MAX_BACKOFF_S))
            status, text = await self._post(body)
            if status == 200:
                return self._decode(text)
            failure = f"answered {status}: {text}" if status else text
            if 0 < status < 500:
                raise RewardFailed(self._line(failure))
        raise RewardFailed(self._line(f"{failure} ({self._tries} tries)"))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(self, body: bytes) -> tuple[int, str]:
        """(HTTP status, text), or (0, reason) where no connection came about."""
        import aiohttp

        try:
            async with self._open_session().post(self._url, data=body, headers=HEADERS) as answer:
                return answer.status, await answer.text(errors="replace")
        except TimeoutError:
            raise RewardFailed(self._line(f"no answer within {self._timeout_s:g} s")) from None
        except aiohttp.ClientConnectionError as error:
            return 0, f"{type(error).__name__}: {error}"
        except (aiohttp.ClientError, OSError, ValueError) as error:  # a malformed URL, host or answer
            raise RewardFailed(self._line(f"{type(error).__name__}: {error}")) from None

    def _open_session(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s))
        return self._session

    def _decode(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):  # thousands of digits, thousands of brackets
            raise RewardFailed(self._line(f"answered no JSON: {text}")) from None

    def _line(self, what: str) -> str:
        return f"reward service {self._url} " + " ".join(what.split())[:300]
