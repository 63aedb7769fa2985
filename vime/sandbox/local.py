"""A sandbox on this machine: one short-lived process tree a run, behind ``jail.py``."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import fcntl
import functools
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias, get_args

from vime.deadlines import not_counted
from vime.processes import close_pipes, ended
from vime.sandbox import jail
from vime.sandbox.types import DEFAULT_LIMITS, Files, Job, Limits, Outcome, Result, SandboxError
from vime.threads import in_thread

logger = logging.getLogger(__name__)

Isolation: TypeAlias = Literal["namespaces", "user_namespaces", "process"]
"""From the strongest to the weakest.

* ``namespaces``: own processes, network, file system; needs root with CAP_SYS_ADMIN, the code runs as another user.
* ``user_namespaces``: the same for everybody, where the kernel allows it.
* ``process``: limits and another user where we are root; files that everybody may read and the network are open.
"""

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives", "/etc/ld.so.cache")
_PREFIX = "vime-sandbox-"
_LEFT_S = 3600.0  # for which a directory that nobody holds has not been changed, until it is taken for left
_START_S = 30.0  # beyond the wall-clock limit, until we no longer believe in the watcher's own clock
_GRACE_S = 5.0  # for the watcher to kill what it watches
_CHUNK = 1 << 16


class LocalSandbox:
    """Runs code on this machine, shut in as well as the kernel allows.

    Args:
        isolation: how; "auto" takes the strongest that works here, and says it where that is ``process``.
        readable: further paths that the code may read, with namespaces; the system's programs and this Python are.
        environment: further variables; nothing of ours is passed on.
        concurrency: commands that run at one time; the others wait. None: one a core.
    """

    def __init__(
        self,
        isolation: Isolation | Literal["auto"] = "auto",
        *,
        readable: Sequence[str | Path] = (),
        environment: Mapping[str, str] | None = None,
        concurrency: int | None = None,
    ) -> None:
        if isolation not in ("auto", *get_args(Isolation)):
            raise ValueError(f"isolation is auto, {', '.join(get_args(Isolation))}, not {isolation!r}")
        self._isolation: Isolation | None = None if isolation == "auto" else isolation
        self._readable = [str(path) for path in (*_SYSTEM, *_python_paths(), *readable) if Path(path).exists()]
        self._environment = {**_environment(), **(environment or {})}
        self._slots = asyncio.Semaphore(concurrency or os.cpu_count() or 1)
        self._choosing = asyncio.Lock()
        self._swept = False

    async def run(
        self, files: Files, command: Sequence[str], stdin: str | bytes = "", limits: Limits = DEFAULT_LIMITS
    ) -> Result:
        """See ``Sandbox.run``."""
        job = Job.of(files, command, stdin, limits)
        isolation = await self.isolation()
        with not_counted():
            await self._slots.acquire()
        try:
            return await self._run(isolation, job)
        finally:
            self._slots.release()

    async def isolation(self) -> Isolation:
        """How code is shut in here. Found out by trying, the first time.

        Raises:
            SandboxError: not even a process can be started.
        """
        async with self._choosing:
            if not self._swept:
                self._swept = True
                await in_thread(_sweep, name="sandbox-sweep")
            if self._isolation is None:
                self._isolation = await self._strongest()
            return self._isolation

    async def _strongest(self) -> Isolation:
        reasons: list[str] = []
        trial = Job.of({}, ["/bin/sh", "-c", "exit 0"], b"", Limits(wall_s=_START_S))
        for isolation in get_args(Isolation):
            try:
                result = await self._run(isolation, trial)
                if result.ok:
                    return self._chosen(isolation, reasons)
                reasons.append(f"{isolation}: {result.stderr.strip() or result.status.value}")
            except SandboxError as error:
                reasons.append(f"{isolation}: {error}")
        raise SandboxError(f"no code can be run here: {'; '.join(reasons)}")

    def _chosen(self, isolation: Isolation, reasons: list[str]) -> Isolation:
        if isolation == "process":
            logger.warning(
                "sandbox: the kernel allows no namespaces here (%s); code runs with limits only: it can reach the "
                "network and read what other users may read. See docs/en/advanced/sandbox.md",
                "; ".join(reasons),
            )
        return isolation

    async def _run(self, isolation: Isolation, job: Job) -> Result:
        try:
            directory, held = _claimed()
        except OSError as error:
            raise SandboxError(f"cannot make a directory: {error}") from error
        try:
            return await self._run_in(directory, isolation, job)
        except OSError as error:
            raise SandboxError(f"cannot start a process: {error}") from error
        finally:
            os.close(held)
            await in_thread(functools.partial(_remove, directory), name="sandbox-remove")

    async def _run_in(self, directory: str, isolation: Isolation, job: Job) -> Result:
        spec = {
            "parent": os.getpid(),
            "isolation": isolation,
            "directory": directory,
            "readable": self._readable,
            "environment": self._environment,
            "command": job.command,
            "files": {path: base64.b64encode(content).decode() for path, content in job.files.items()},
            "limits": dataclasses.asdict(job.limits),
        }
        with contextlib.ExitStack() as stack:
            spec_file = _filled(stack, json.dumps(spec).encode())
            stdin = _filled(stack, job.stdin)
            reports, reporting = os.pipe()
            stack.callback(os.close, reports)
            try:
                process = await asyncio.create_subprocess_exec(
                    *[sys.executable, "-I", "-S", jail.__file__, str(spec_file.fileno()), str(reporting)],
                    stdin=stdin,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    pass_fds=(spec_file.fileno(), reporting),
                    env={},
                    cwd="/",
                    start_new_session=True,
                )
            finally:
                os.close(reporting)
            outputs, excess = await _watched(process, job.limits)
            return _result(outputs, excess, _read_report(reports))


async def _watched(process: asyncio.subprocess.Process, limits: Limits) -> tuple[list[str], Outcome | None]:
    """The output of the process, which is gone afterwards; and the limit that we saw passed ourselves."""
    excess: Outcome | None = None

    async def drain(stream: asyncio.StreamReader | None) -> str:
        nonlocal excess
        assert stream is not None
        kept = bytearray()
        while chunk := await stream.read(_CHUNK):
            if len(kept) + len(chunk) > limits.output_bytes and excess is None:
                excess = Outcome.OUTPUT
                _signal(process, signal.SIGTERM)
            kept += chunk[: limits.output_bytes - len(kept)]
        return kept.decode(errors="replace")

    outputs = ["", ""]
    try:
        async with asyncio.timeout(limits.wall_s + _START_S):
            outputs = list(await asyncio.gather(drain(process.stdout), drain(process.stderr)))
    except TimeoutError:
        excess = Outcome.TIMEOUT
    finally:
        await _end(process)
    return outputs, excess


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends the watcher, which ends everything else, and returns when it is gone."""
    try:
        async with asyncio.timeout(_GRACE_S):
            _signal(process, signal.SIGTERM)
            await ended(process)
    except TimeoutError:
        pass
    finally:
        _signal(process, signal.SIGKILL)
        await ended(process)
        close_pipes(process)


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    """Like ``process.send_signal``, which may reap the process before asyncio does and lose how it ended."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _result(outputs: list[str], excess: Outcome | None, report: dict[str, Any]) -> Result:
    """Raises SandboxError where the watcher says that it could not shut the code in."""
    if "error" in report:
        raise SandboxError(report["error"])
    killed = Outcome(report["killed"]) if "killed" in report else None
    status = excess or killed or (Outcome.EXITED if "code" in report else Outcome.STOPPED)
    return Result(
        stdout=outputs[0],
        stderr=outputs[1],
        status=status,
        exit_code=report["code"] if status is Outcome.EXITED else None,
        seconds=report.get("seconds", 0.0),
    )


def _read_report(fd: int) -> dict[str, Any]:
    """All that the watcher and the first process said; whoever could write is gone."""
    parts = bytearray()
    while part := os.read(fd, _CHUNK):
        parts += part
    found: dict[str, Any] = {}
    for line in parts.splitlines():
        found |= json.loads(line)
    return found


def _filled(stack: contextlib.ExitStack, content: bytes) -> IO[bytes]:
    """A file without a name, to be read from its start."""
    file: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
    file.write(content)
    file.seek(0)
    return file


def _claimed() -> tuple[str, int]:
    """A new directory, and the open file whose lock says that somebody uses it."""
    directory = tempfile.mkdtemp(prefix=_PREFIX)
    held = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(held, fcntl.LOCK_EX)
    return directory, held


def _sweep() -> None:
    """Removes the directories of runs that were killed together with their watchers, where we may."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and _is_left(entry.path):
                _remove(entry.path)


def _is_left(directory: str) -> bool:
    """Whether nobody uses it: whoever does holds a lock, which the kernel takes away when a process is gone. Lately
    changed ones are spared: a watcher may outlive the holder of the lock for a while."""
    try:
        found = os.lstat(directory)
        ours = found.st_uid == os.geteuid() or (os.geteuid() == 0 and found.st_uid in jail.USERS)
        if not ours or time.time() - found.st_mtime < _LEFT_S:
            return False
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(folder)
    except OSError:
        return False
    return True


def _remove(directory: str) -> None:
    """Removes what the code left."""
    try:
        jail.remove(directory)
    except FileNotFoundError:
        pass  # the watcher was faster
    except OSError as error:
        logger.warning("sandbox: %s is left, it cannot be removed: %s", directory, error)


@functools.cache
def _python_paths() -> tuple[str, ...]:
    """Where this interpreter and its packages are, under each name by which they are called."""
    paths = [sys.prefix, sys.base_prefix, sys.exec_prefix]
    resolved = [os.path.realpath(path) for path in paths]
    return tuple(dict.fromkeys([*paths, *resolved]))


def _environment() -> dict[str, str]:
    """All that the code gets. One thread a library: the limit of processes counts threads."""
    path = [os.path.dirname(sys.executable), "/usr/local/bin", "/usr/bin", "/bin"]
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {
        "PATH": os.pathsep.join(path),
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        **dict.fromkeys(threads, "1"),
    }
