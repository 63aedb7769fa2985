"""Names for what a process has under way, from which others can tell whether it still lives.

    .NAME.HOST.PID-START.tmp

START is when the process began, in clock ticks since the machine did (field 22 of ``/proc/PID/stat``). The number alone
would not do: another process gets it, and soon in a container, which counts from 1 after each restart and keeps HOST.
"""

from __future__ import annotations

import os
import re
import socket
from enum import Enum
from pathlib import Path

import psutil

__all__ = ["Owner", "identity", "owner_of", "unfinished"]

_OWNER = re.compile(r"(?P<host>.+)\.(?P<pid>\d{1,9})(-(?P<start>\d+))?(\.old)?\.tmp")


class Owner(Enum):
    """Whose something unfinished is."""

    SELF = "this process"
    ALIVE = "a process that lives"
    DEAD = "a process that has ended"
    ELSEWHERE = "a process of another machine"
    UNCLEAR = "a process that may have ended, its number being another's now"


def unfinished(path: Path, ending: str = "tmp") -> Path:
    """The hidden name, beside ``path``, of what this process is about to put there."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{identity(os.getpid())}.{ending}")


def identity(pid: int) -> str:
    """What tells a living process from all others of its machine."""
    return f"{pid}-{_started(pid)}"


def owner_of(hidden: Path, name: str) -> Owner | None:
    """Who left ``hidden`` beside the file or folder ``name``; None: it is no such thing."""
    prefix = f".{name}."
    match = _OWNER.fullmatch(hidden.name.removeprefix(prefix)) if hidden.name.startswith(prefix) else None
    if match is None:
        return None
    if match["host"] != socket.gethostname():
        return Owner.ELSEWHERE
    pid, began = int(match["pid"]), _started(int(match["pid"]))
    if began is None:
        return Owner.UNCLEAR if _is_hidden(pid) else Owner.DEAD
    if match["start"] is None:  # as older versions wrote it
        return Owner.DEAD if pid == os.getpid() else Owner.UNCLEAR
    if int(match["start"]) != began:
        return Owner.DEAD
    return Owner.SELF if pid == os.getpid() else Owner.ALIVE


def _started(pid: int) -> int | None:
    """Clock ticks from the machine's start to the process's; None: it has ended, or may not be seen."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # behind the name of the program, which may have spaces
    return None if state in "ZX" else int(fields[18])


def _is_hidden(pid: int) -> bool:
    """Whether there is such a process of a user whose processes may not be looked at (/proc with hidepid)."""
    return not Path(f"/proc/{pid}").exists() and psutil.pid_exists(pid)
