"""Runs one command and makes sure that nothing of it outlives whoever asked for it.

    python -I -S guard.py PARENT_PID GRACE_S REPORT_FD COMMAND...

The guard ends the whole tree below it when the command ends, when it gets SIGTERM or SIGINT (the command then has
GRACE_S seconds to end by itself), and when its parent is gone, even by SIGKILL. It exits with the command's status, and
writes it to the file descriptor REPORT_FD as soon as it is known, which may be seconds before the whole tree is gone.

It adopts orphans, so that a grandchild whose own parent was killed is found and ended too. A process cannot promise
this for itself: the kernel's death signal follows the thread that started a child, not the process, and reaches only
children. Only the standard library is used; a guard starts in 20 ms and needs 10 MB.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.5  # how late the death of the parent may be noticed
TRACKER_S = 8.0  # it takes half a second, and ten times that on a busy machine
WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}


def main(parent: int, grace_s: float, report: int, command: list[str]) -> int:
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    try:
        child = subprocess.Popen(command, preexec_fn=_prepare_child)
        status = _watch(child.pid, parent, grace_s)
        with contextlib.suppress(BrokenPipeError):  # whoever asked is gone
            os.write(report, str(status).encode())
        return status
    finally:
        _end_all()


def _watch(child: int, parent: int, grace_s: float) -> int:
    """Returns the exit status of ``child``, or 137 when its time is up."""
    deadline = float("inf")
    while True:
        event = signal.sigtimedwait(WATCHED, POLL_S)
        if event is not None and event.si_signo != signal.SIGCHLD and deadline == float("inf"):
            os.kill(child, signal.SIGTERM)
            deadline = time.monotonic() + grace_s
        for pid, status in _reap():
            if pid == child:
                return _exit_status(status)
        if os.getppid() != parent or time.monotonic() > deadline:
            return 128 + signal.SIGKILL


def _reap() -> list[tuple[int, int]]:
    """Children that have ended, with their wait status."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (pair := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(pair)
    return ended


def _end_all() -> None:
    """Kills all processes below, then waits for Python's resource trackers among them.

    A tracker ends by itself after the last process that it serves, and removes what that one left in /dev/shm.
    """
    while doomed := [pid for pid in _children() if not _is_tracker(pid)]:
        _kill(doomed)  # which makes their children ours
    deadline = time.monotonic() + TRACKER_S
    while _children() and time.monotonic() < deadline:
        _reap()
        time.sleep(0.01)
    _kill(_children())


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _children() -> list[int]:
    me = str(os.getpid())
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _parent_of(pid) == me]


def _parent_of(pid: str) -> str:
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()  # the name before may hold anything
    return fields[1].decode() if fields else ""


def _read(path: str) -> bytes:
    """The file, or nothing if its process has ended."""
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError:
        return b""


def _is_tracker(pid: int) -> bool:
    return b"multiprocessing.resource_tracker" in _read(f"/proc/{pid}/cmdline")


def _prepare_child() -> None:
    """In the command's process: dies with the guard, takes signals again."""
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends. A guard cannot do its work if it is killed
    itself; what it watches then still ends, if each process below asks for this."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _exit_status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
