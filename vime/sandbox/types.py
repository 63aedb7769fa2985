"""What a sandbox is asked and what it answers."""

from __future__ import annotations

import enum
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from typing import Protocol, TypeAlias

Files: TypeAlias = Mapping[str, str | bytes]
"""Path relative to the working directory → content; text is written as UTF-8."""


class SandboxError(RuntimeError):
    """The sandbox itself failed: code did not run, or nobody knows how it ended. One line."""


class Outcome(enum.Enum):
    """How a command ended; all but EXITED mean that it was killed, with everything that it had started (DISK: or
    that it ended before somebody saw what it had written)."""

    EXITED = "exited"  # by itself or by a signal: see exit_code
    TIMEOUT = "timeout"  # wall-clock or CPU time was used up
    MEMORY = "memory"  # all its processes together had more than memory_bytes
    DISK = "disk"  # its files are larger, or are more, than allowed
    OUTPUT = "output"  # it wrote more than output_bytes to standard output or error
    STOPPED = "stopped"  # it ended the process that watched it; see docs/en/advanced/sandbox.md


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one command, with everything that it starts, may use. Reaching one is an Outcome, never an exception."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 512 << 20  # address space of each process, and resident memory of all together
    disk_bytes: int = 64 << 20  # all files together
    files: int = 1024  # files and directories
    processes: int = 32  # processes and threads at one time
    output_bytes: int = 1 << 20  # of standard output, and as much of standard error

    def __post_init__(self) -> None:
        """Raises ValueError for what the kernel cannot be given."""
        for each in fields(self):
            value = getattr(self, each.name)
            is_whole = each.type == "int"
            kind, most = ("a whole number", MOST) if is_whole else ("a number", MOST_SECONDS)
            if type(value) not in ((int,) if is_whole else (int, float)) or not 0 < value <= most:
                given = f"{each.name}={reprlib.repr(value)}"
                raise ValueError(f"a limit of a sandbox is {kind} above 0 and at most {most:,}, not {given}")


MOST = 1 << 50
"""Of bytes, files, processes: beyond it calls of the kernel overflow."""

MOST_SECONDS = 1_000_000_000

DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a command did. Its output is cut at ``Limits.output_bytes``; bytes that are no UTF-8 are replaced."""

    stdout: str
    stderr: str
    status: Outcome
    exit_code: int | None = None  # None unless status is EXITED; -9: killed by signal 9; 127: no such command
    seconds: float = 0.0  # wall-clock

    @property
    def ok(self) -> bool:
        return self.status is Outcome.EXITED and self.exit_code == 0


class Sandbox(Protocol):
    """Runs untrusted code. Local or remote; a fake may stand in for it in tests."""

    async def run(
        self, files: Files, command: Sequence[str], stdin: str | bytes = "", limits: Limits = DEFAULT_LIMITS
    ) -> Result:
        """Runs ``command`` in a new directory that holds ``files``.

        Raises:
            SandboxError: the sandbox failed; never for anything that the code does.
            ValueError: a path leaves the directory, or there is no command.
        """


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request: what both kinds of sandbox make of the arguments of ``run``."""

    files: dict[str, bytes]
    command: list[str]
    stdin: bytes
    limits: Limits

    @classmethod
    def of(cls, files: Files, command: Sequence[str], stdin: str | bytes, limits: Limits) -> Job:
        """Raises ValueError where a path leaves the directory or there is no command."""
        if not command or isinstance(command, str):
            raise ValueError(f"the command of a sandbox is a list of at least one word, not {command!r}")
        for word in command:
            if not _can_be_passed(word):
                raise ValueError(f"a word of a command holds a zero byte or half a character: {reprlib.repr(word)}")
        contents = {_checked(path): _encoded(content) for path, content in files.items()}
        return cls(contents, list(command), _encoded(stdin), limits)


def _checked(path: str) -> str:
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts or not _can_be_passed(path):
        raise ValueError(f"a file of a sandbox has a relative path without '..' that is text, not {reprlib.repr(path)}")
    return str(parts)


def _can_be_passed(text: str) -> bool:
    """Whether it can be a name or a word of a command. Bytes that are no UTF-8 can, as ``os.fsdecode`` shows them."""
    try:
        return b"\0" not in text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return False


def _encoded(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", errors="surrogatepass")
