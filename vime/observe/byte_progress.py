"""How far a copy of many tensors is: one line that is redrawn on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from vime.observe.summary import duration

__all__ = ["ByteProgress"]

TERMINAL_INTERVAL_S = 0.1
PLAIN_INTERVAL_S = 10.0


class ByteProgress:
    """Counts tensors and bytes and shows them with the rate. A context manager: the last line says the whole.

    Args:
        what: begins each line, e.g. "reading Qwen3-4B".
        tensors: how many there will be.
        nbytes: their bytes altogether.
        stream: where to write; standard error by default, so that output can still be piped.
        clock: seconds, from any origin.
    """

    def __init__(
        self,
        what: str,
        *,
        tensors: int,
        nbytes: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._tensors, self._nbytes = tensors, nbytes
        self._done = self._done_bytes = 0
        self._stream = stream or sys.stderr
        self._clock = clock
        self._redraws = self._stream.isatty()
        self._interval = TERMINAL_INTERVAL_S if self._redraws else PLAIN_INTERVAL_S
        self._began = self._shown = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show()
        if self._redraws:
            self._stream.write("\n")

    def add(self, nbytes: int) -> None:
        """One more tensor is done."""
        self._done += 1
        self._done_bytes += nbytes
        if self._clock() - self._shown >= self._interval:
            self._show()

    def _show(self) -> None:
        self._shown = self._clock()
        self._stream.write(f"\r{self._line()}\x1b[K" if self._redraws else f"{self._line()}\n")
        self._stream.flush()

    def _line(self) -> str:
        seconds = self._shown - self._began
        rate = f"{self._done_bytes / seconds / 1e9:.2f} GB/s" if seconds > 0 else "-"
        done = f"{self._done} of {self._tensors} tensors, {_gb(self._done_bytes)} of {_gb(self._nbytes)}"
        return f"{self._what}: {done}, {rate}, {duration(seconds)}"


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
