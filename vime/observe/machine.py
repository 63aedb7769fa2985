"""What this machine, or the container on it, lets a process have."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

__all__ = ["cores", "host_bytes", "host_limit", "installed_bytes"]

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where version 2 and 1 of control groups say how much memory a container may take; "max" is no limit."""
NO_LIMIT = 1 << 60
"""Version 1 writes the largest number that it has where there is none."""


def host_bytes() -> int:
    """The memory of the machine, or of the container where that is less."""
    limit = host_limit()
    return installed_bytes() if limit is None else min(installed_bytes(), limit)


def host_limit() -> int | None:
    """What the container may take, beyond which its processes are killed; None without a limit."""
    told = [path.read_text().strip() for path in map(Path, LIMITS) if path.is_file()]
    return min((int(limit) for limit in told if limit.isdecimal() and int(limit) < NO_LIMIT), default=None)


def installed_bytes() -> int:
    """What the machine says it has now. A virtual one may say less than it can have: some grow as memory is used."""
    return int(psutil.virtual_memory().total)


def cores() -> int:
    """Those on which this process may run."""
    return len(os.sched_getaffinity(0))
