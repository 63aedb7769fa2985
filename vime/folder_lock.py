"""A folder that one run at a time writes to: locked for as long as the run lives, and free once it has ended.

The lock is ``flock`` on a small file in the folder. The kernel gives it up when the process ends, however it ends, so
the file may stay. It says who has the lock, for the message of the one that does not get it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vime.errors import UserError
from vime.files import reason, writing

__all__ = ["LOCK", "locked"]

LOCK = ".vime.lock"

logger = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path | str, flag: str) -> Iterator[None]:
    """Holds ``folder``, which is made if missing, for the time of the block.

    Args:
        flag: which names the folder.

    Raises:
        UserError: another process holds it, or the file cannot be written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"{flag} {folder}: nothing can be written there: {reason(error)}") from error
    try:
        _lock(descriptor, folder, flag)
        with writing(folder / LOCK):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path, flag: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        said = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        raise UserError(
            f"{flag} {folder}: another run writes there ({said or 'which one is not known'}); wait for its end, or "
            "give another folder"
        ) from None
    except OSError as error:
        logger.warning(
            "%s cannot be locked (%s): nothing keeps a second run from writing there", folder, error.strerror
        )
