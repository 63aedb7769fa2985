"""A sandbox on another machine, by HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vime.sandbox.types import DEFAULT_LIMITS, Files, Job, Limits, Result, SandboxError
from vime.sandbox.wire import job_to_json, result_from_json

if TYPE_CHECKING:
    import aiohttp

TOKEN_VARIABLE = "VIME_SANDBOX_TOKEN"
"""Where server and clients have their common secret from."""

_BUSY = (429, 502, 503, 504)
_PAUSE_S = (0.1, 2.0)  # before the second try, which doubles, up to the second number


class RemoteSandbox:
    """A client of ``python -m vime.sandbox.server``, or of any service with its protocol. Close it at the end.

    A service that is busy or cannot be reached is asked again until the deadline: a run changes nothing, so that it may
    be repeated.

    Args:
        url: of the service; requests go to ``URL/run``.
        token: what the service asks for, sent as a bearer token.
        waiting_s: how long a request may wait and travel, beyond the wall-clock limit of its code.
    """

    def __init__(self, url: str, *, token: str | None = None, waiting_s: float = 60.0) -> None:
        self._url = f"{url.rstrip('/')}/run"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._waiting_s = waiting_s
        self._session: aiohttp.ClientSession | None = None

    async def run(
        self, files: Files, command: Sequence[str], stdin: str | bytes = "", limits: Limits = DEFAULT_LIMITS
    ) -> Result:
        """See ``Sandbox.run``."""
        job = Job.of(files, command, stdin, limits)
        deadline_s = limits.wall_s + self._waiting_s
        failures = ["no answer"]
        try:
            async with asyncio.timeout(deadline_s):
                return self._result(*await self._ask(job_to_json(job), failures))
        except TimeoutError:
            raise SandboxError(f"{self._url}: no result within {deadline_s:g} s: {failures[-1]}") from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, body: dict[str, Any], failures: list[str]) -> tuple[int, str]:
        import aiohttp

        pause = _PAUSE_S[0]
        while True:
            try:
                async with self._open().post(self._url, json=body, headers=self._headers) as answer:
                    if answer.status not in _BUSY:
                        return answer.status, await answer.text(errors="replace")
                    failures.append(f"it answered {answer.status}")
            except aiohttp.ClientConnectionError as error:
                failures.append(f"{type(error).__name__}: {error}")
            except aiohttp.ClientError as error:
                raise SandboxError(f"{self._url}: {type(error).__name__}: {error}") from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PAUSE_S[1])

    def _result(self, status: int, text: str) -> Result:
        if status != 200:
            raise SandboxError(f"{self._url} answered {status}: {' '.join(text.split())[:300]}")
        try:
            return result_from_json(json.loads(text))
        except ValueError as error:
            raise SandboxError(f"{self._url} answered something else than a result: {error}") from error

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        return self._session
