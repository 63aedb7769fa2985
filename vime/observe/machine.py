"""What this machine, or the container on it, lets a process have."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

__all__ = ["cores", "host_bytes"]

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where version 2 and 1 of control groups say how much memory a container may take; "max" is no limit."""


def host_bytes() -> int:
    """The memory of the machine, or of the container where that is less."""
    told = [path.read_text().strip() for path in map(Path, LIMITS) if path.is_file()]
    return min([int(psutil.virtual_memory().total), *(int(limit) for limit in told if limit.isdecimal())])


def cores() -> int:
    """Those on which this process may run."""
    return len(os.sched_getaffinity(0))
