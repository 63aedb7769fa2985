"""Large buffers go to a file in pieces."""

from __future__ import annotations

from typing import IO, Any

__all__ = ["PiecewiseFile"]

PIECE_BYTES = 1 << 24  # measured with ext4: writes of 128 MB and more take three times as long as those of 16 MB


class PiecewiseFile:
    """What ``torch.save`` needs of a file to write to. The file had better have no buffer of its own: what a full disk
    does not take would be tried once more when the file is closed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        """Writes anything that has a buffer."""
        buffer = memoryview(data).cast("B")
        size = len(buffer)
        while buffer:
            buffer = buffer[self._file.write(buffer[:PIECE_BYTES]) :]
        return size

    def flush(self) -> None:
        self._file.flush()
