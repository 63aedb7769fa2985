"""What a disk that takes no more makes of a checkpoint: one line, whoever wrote and whatever torch says of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from vime.errors import UserError
from vime.files import cannot_write, refusal_behind

__all__ = ["saving"]

_TORCHS = ("inline_container.cc", "PytorchStreamWriter", "iostream error")
"""torch's writer in C++ says that something is not as long as it should be, and forgets why. Of errors of other ranks,
only copies come."""
_FULL = 1 << 20  # free bytes: what did not find room is still there


@contextmanager
def saving(directory: Path | str) -> Iterator[None]:
    """For blocks that write a part of a checkpoint, on all ranks.

    Raises:
        UserError: what a rank wrote was not taken.
    """
    try:
        yield
    except CheckpointException as error:  # with what each rank raised
        told = next((each for raised, _ in error.failures.values() if (each := _told(directory, raised))), None)
        if told is None:
            raise
        raise told from error
    except (OSError, RuntimeError) as error:
        if (told := _told(directory, error)) is None:
            raise
        raise told from error


def _told(directory: Path | str, error: BaseException) -> UserError | None:
    """None: it has nothing to do with the disk."""
    refused = refusal_behind(error)
    if isinstance(refused, ConnectionError | TimeoutError):  # of other ranks
        return None
    if refused is not None:
        return cannot_write(directory, refused)
    if not any(name in str(error) for name in _TORCHS):
        return None
    free = _free_bytes(directory)
    full = "No space left on device" if free < _FULL else f"{free:,} bytes are free there, but"
    return UserError(f"{directory}: cannot be written: {full} ({str(error).strip().splitlines()[0]})")


def _free_bytes(directory: Path | str) -> int:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return 0
