"""Runs one measure in a process of its own, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from bench.measures import Entry

PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 10.0
LAST_WORDS = 1500  # characters of the log in an error


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends, so that ``end_children`` finds it."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def run_measure(entry: Entry, folder: Path) -> dict[str, Any]:
    """The result of a measure, or {"error": why there is none}. Its log is ``folder``/NAME.log."""
    command = [sys.executable, "-m", "bench.child", entry.module, str(folder / entry.name)]
    return run_command(command, folder / f"{entry.name}.log", entry.timeout_s)


def run_command(command: list[str], log: Path, timeout_s: float) -> dict[str, Any]:
    """The JSON objects that a command prints, taken together, or {"error": why there are none}.

    One that ends badly, or not in time, leaves what it had printed until then beside the error, as "printed".
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        return _run(command, log, timeout_s)
    except subprocess.TimeoutExpired as late:
        return {"error": f"not finished within {timeout_s:g} s; {_last_words(log)}"} | _printed(late.output)
    finally:
        end_children()


def _run(command: list[str], log: Path, timeout_s: float) -> dict[str, Any]:
    with log.open("wb") as errors:
        # a session of its own: Ctrl-C reaches us alone, and we end the measure
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
        output, _ = child.communicate(timeout=timeout_s)
    if child.returncode != 0:
        return {"error": f"ended with status {child.returncode}; {_last_words(log)}"} | _printed(output)
    try:
        return _objects(output.decode())
    except ValueError as error:
        return {"error": f"what it printed is no result ({error}); {_last_words(log)}"}


def _objects(text: str) -> dict[str, Any]:
    """Raises ValueError for anything but one or more JSON objects."""
    found: dict[str, Any] = {}
    rest = text.strip()
    while rest or not found:
        one, end = json.JSONDecoder().raw_decode(rest)
        found |= one
        rest = rest[end:].lstrip()
    return found


def _printed(output: bytes | None) -> dict[str, Any]:
    """The whole objects at the start of what was printed; the last one may have been cut."""
    found: dict[str, Any] = {}
    rest = (output or b"").decode(errors="replace").strip()
    with contextlib.suppress(ValueError):
        while rest:
            one, end = json.JSONDecoder().raw_decode(rest)
            found |= one if isinstance(one, dict) else {}
            rest = rest[end:].lstrip()
    return {"printed": found} if found else {}


def _last_words(log: Path) -> str:
    return f"the end of {log}: {log.read_text(errors='replace')[-LAST_WORDS:].strip()}"


def end_children(grace_s: float = GRACE_S) -> None:
    """Ends every descendant of this process: SIGTERM, then SIGKILL."""
    me = psutil.Process()
    for child in me.children(recursive=True):
        _quietly(child.terminate)
    psutil.wait_procs(me.children(recursive=True), timeout=grace_s)
    for child in me.children(recursive=True):
        _quietly(child.kill)
    psutil.wait_procs(me.children(recursive=True), timeout=grace_s)
    _reap()


def _quietly(action: Any) -> None:
    try:
        action()
    except psutil.NoSuchProcess:
        return


def _reap() -> None:
    """Takes the exit status of orphans that ended here, so that no zombie stays."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return
