"""What the conversion tools show while they copy."""

from __future__ import annotations

import io

from vime.observe.byte_progress import ByteProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def copy(stream: io.StringIO, seconds: list[float]) -> str:
    """Three tensors of 1 GB, the clock read at these times."""
    times = iter(seconds)
    with ByteProgress(
        "converted", tensors=3, nbytes=3_000_000_000, stream=stream, clock=lambda: next(times)
    ) as progress:
        for _ in range(3):
            progress.add(1_000_000_000)
    return stream.getvalue()


def test_plain_lines_come_every_ten_seconds_and_at_the_end() -> None:
    lines = copy(io.StringIO(), [0, 4, 12, 12.5, 14, 15]).splitlines()
    assert lines == [
        "converted: 2 of 3 tensors, 2.00 GB of 3.00 GB, 0.16 GB/s, 12.5 s",
        "converted: 3 of 3 tensors, 3.00 GB of 3.00 GB, 0.20 GB/s, 15.0 s",
    ]


def test_a_terminal_shows_one_line_that_is_redrawn() -> None:
    shown = copy(Terminal(), [0, 1, 1, 2, 2, 3, 3, 4])
    assert (
        shown.count("\r") == 4
        and shown.count("\n") == 1
        and shown.endswith("3.00 GB of 3.00 GB, 0.75 GB/s, 4.0 s\x1b[K\n")
    )
    assert "converted: 1 of 3 tensors" in shown
