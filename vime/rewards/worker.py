"""A grader process: ``python -m vime.rewards.worker`` reads requests as JSON lines and answers each with one line.

It trusts nothing that it grades: its address space and CPU time are limited, it cannot outlive its parent, and it never
unpickles. Before a grading starts it says so, because only then the parent's deadline begins: importing sympy on a busy
machine is not the answer's fault.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Iterable
from typing import IO, Any

from vime.rewards import registry
from vime.rewards.wire import grade_to_json
from vime.types import Grade

_PR_SET_PDEATHSIG = 1
_CPU_MARGIN_S = 2
_WARM_UP = r"Answer: \boxed{x+2}, not 3"


def main(argv: list[str]) -> int:
    """Arguments: process id of the parent, memory limit in bytes (0: none), names of graders to load at once."""
    parent, memory_limit, *preload = argv
    _die_with(int(parent))
    channel = _private_stdout()
    _limit_memory(int(memory_limit))
    for name in preload:
        registry.load(name)(_WARM_UP, "x+1", {})
    _send(channel, {"state": "ready"})
    serve(sys.stdin.buffer, channel)
    return 0


def serve(requests: Iterable[bytes], channel: IO[str]) -> None:
    """Answers requests until the other side closes."""
    for line in requests:
        request = json.loads(line)
        try:
            function = registry.load(request["rm_type"])
            _limit_cpu(request["deadline_s"])
            _send(channel, {"state": "started"})
            grade = function(request["response"], request["label"], request["metadata"])
        except MemoryError:
            grade = Grade.error("the memory limit was reached")
        except Exception as error:  # the process outlives a grader's mistake and says what it was
            grade = Grade.error(f"{request['rm_type']} raised {type(error).__name__}: {error}"[:500])
        _send(channel, {"state": "done", **grade_to_json(grade)})


def _send(channel: IO[str], record: dict[str, Any]) -> None:
    channel.write(json.dumps(record) + "\n")
    channel.flush()


def _private_stdout() -> IO[str]:
    """Takes standard output for ourselves; what a library prints goes to standard error."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def _limit_memory(limit_bytes: int) -> None:
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_cpu(seconds: float) -> None:
    """A second line of defence: the kernel ends us where a stuck parent does not."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds) + _CPU_MARGIN_S
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
