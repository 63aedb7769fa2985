"""One grader process, seen from its parent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from vime.processes import close_pipes, ended

_MAX_LINE_BYTES = 1 << 20
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class ProcessEnded(RuntimeError):
    """The grader process is gone; the message says how it ended."""


class EndedIdle(ProcessEnded):
    """It was gone before it began with the request, so another process may take that."""


class NotSent(ValueError):
    """A request that JSON cannot hold."""


class Killed(ProcessEnded):
    """Somebody killed it, not its grader: the kernel, say, whose memory another process used up."""


class GraderProcess:
    """A child process that grades one answer at a time.

    After an exception of ``grade``, of any kind but NotSent, the process is in an unknown state: ``kill`` it.
    """

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._process = process
        self._errors = errors

    @classmethod
    async def start(
        cls,
        module: str,
        *,
        memory_limit_bytes: int,
        preload: Sequence[str],
        deadline_s: float,
        environment: Mapping[str, str],
    ) -> GraderProcess:
        """Starts ``python -m module`` and waits until its graders are loaded.

        Raises:
            ProcessEnded: it ended, or was not ready in time.
        """
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        arguments = [str(os.getpid()), str(memory_limit_bytes), *preload]
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-P", "-m", module, *arguments],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env={**_environment(), **environment},
            limit=_MAX_LINE_BYTES,
            start_new_session=True,  # an interrupt from the keyboard is the parent's business
        )
        worker = cls(process, errors)
        try:
            async with asyncio.timeout(deadline_s):
                await worker._expect("ready")
        except TimeoutError:
            await worker.kill()
            raise ProcessEnded(f"the grader process was not ready within {deadline_s:g} s") from None
        except BaseException:
            await worker.kill()
            raise
        return worker

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def grade(self, request: dict[str, Any], *, deadline_s: float, load_deadline_s: float) -> dict[str, Any]:
        """Sends one request and returns the record of its Grade.

        Raises:
            NotSent: JSON cannot hold the request; nothing has been sent.
            TimeoutError: the grader took longer than ``deadline_s``.
            EndedIdle: the process ended before it began with the request.
            Killed: it was killed by SIGKILL while grading.
            ProcessEnded: it ended while grading, or could not load the grader within ``load_deadline_s``.
        """
        assert self._process.stdin is not None
        line = _encoded({**request, "deadline_s": deadline_s})
        try:
            self._process.stdin.write(line)
            async with asyncio.timeout(load_deadline_s):
                await self._process.stdin.drain()
                record = await self._receive()
        except TimeoutError:
            raise ProcessEnded(f"the grader was not loaded within {load_deadline_s:g} s") from None
        except (ProcessEnded, BrokenPipeError, ConnectionResetError):
            raise EndedIdle(str(await self._how_it_ended())) from None
        if record["state"] == "started":
            async with asyncio.timeout(deadline_s):
                record = await self._receive()
        return record

    async def kill(self) -> None:
        """Ends the process at once and waits until it is gone."""
        if self.alive:
            self._process.kill()
        await ended(self._process)
        close_pipes(self._process)
        self._errors.close()

    async def _expect(self, state: str) -> None:
        record = await self._receive()
        assert record["state"] == state, record

    async def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise await self._how_it_ended()
        record: dict[str, Any] = json.loads(line)
        return record

    async def _how_it_ended(self) -> ProcessEnded:
        code = await ended(self._process)
        how = f"by signal {-code}" if code < 0 else f"with exit status {code}"
        last = self._last_error()
        kind = Killed if code == -signal.SIGKILL else ProcessEnded
        return kind(f"the grader process ended {how}" + (f": {last}" if last else ""))

    def _last_error(self) -> str:
        """The last line on its standard error; empty where we ended it ourselves."""
        if self._errors.closed:
            return ""
        self._errors.seek(0)
        lines = self._errors.read()[-4000:].decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _encoded(request: dict[str, Any]) -> bytes:
    try:
        return (json.dumps(request, default=str) + "\n").encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise NotSent(f"the sample cannot be sent to a grader: {type(error).__name__}: {error}") from None


def _environment() -> dict[str, str]:
    """Ours, with this very vime importable from any working directory."""
    paths = [str(_PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
