"""The measure's end of a side that runs in a process of its own (bench/protocol.py is the other end)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

LAST_WORDS = 800  # characters of the log in the message of a side that died


class SideDied(RuntimeError):
    """A side ended before it answered. The message ends with the last words of its log."""


class Side:
    """A child process that does one piece of work a request.

    Args:
        command: what to run.
        log: where its stderr goes.
        environment: variables over those of this process.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self._log = log
        self.last: dict[str, Any] = {}  # the last answer
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(environment or {})},
                text=True,
            )

    def ready(self) -> dict[str, Any]:
        """Waits until the side has loaded what it needs; returns what it says of itself."""
        return self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Has the side do its work once; returns its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        return self._answer()

    def seconds(self, **request: Any) -> float:
        """Has the side do its work once; returns how long that took by its own clock."""
        return float(self.ask(**request)["seconds"])

    def close(self, timeout_s: float = 60) -> None:
        """Ends the side: politely first, by a signal after ``timeout_s``."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout_s)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        self.last = json.loads(line)
        return self.last

    def _died(self) -> SideDied:
        code = self._process.wait()
        words = self._log.read_text(errors="replace")[-LAST_WORDS:]
        return SideDied(f"{self._log.stem} ended with code {code}; its last words: {words}")
