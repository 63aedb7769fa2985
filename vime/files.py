"""Files that vime reads and writes: what the disk refuses, or holds in a damaged form, is one line for the user."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from vime.errors import DamagedFile, UserError

__all__ = [
    "append_whole",
    "cannot_write",
    "name_part",
    "read_json_object",
    "reading",
    "reason",
    "refusal_behind",
    "write_whole",
    "writing",
]


def name_part(text: str) -> str:
    """The text as a part of the name of a file."""
    return "".join(char if char.isalnum() or char in "-_." else "_" for char in text)


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """For blocks that do nothing but write files of ours.

    Raises:
        UserError: the disk is full, the path leads nowhere, …; it names ``path``, or the file below it that failed.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        refused = refusal_behind(error)
        if refused is None:
            raise
        raise cannot_write(path, refused) from error


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """For blocks that do nothing but look at files. Raises a UserError that names the one that cannot be read."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{_named(error) or path}: cannot be read: {reason(error)}") from error


def refusal_behind(error: BaseException) -> OSError | None:
    """What the system said, where another error came of it: torch tells of a wrong position in the file."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause


def cannot_write(path: Path | str, error: OSError) -> UserError:
    """What to tell of a file, or a folder, that could not be written."""
    return UserError(f"{_named(error) or path}: cannot be written: {reason(error)}")


def _named(error: OSError) -> str | None:
    """The file that the system spoke of; that of a write it does not name."""
    return os.fsdecode(error.filename) if isinstance(error.filename, str | bytes | os.PathLike) else None


def reason(error: OSError) -> str:
    """What the system said. Of a folder that cannot be made because a file has its name it says that this exists."""
    return "Not a directory" if isinstance(error, FileExistsError) else error.strerror or str(error)


def write_whole(path: Path, lines: Iterable[str]) -> None:
    """Replaces the file at once, so that a reader never sees half of it.

    Raises:
        UserError: it cannot be written.
    """
    unfinished = path.with_name(path.name + ".tmp")
    with writing(path):
        try:
            # half a surrogate pair has no bytes in UTF-8; its backslash form is what JSON calls it
            with unfinished.open("w", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(lines)
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise


def append_whole(file: FileIO, data: bytes) -> None:
    """Writes at the end of a file without a buffer: all, or nothing where the disk does not take all of it.

    Raises:
        OSError: it was nothing.
    """
    start = file.seek(0, os.SEEK_END)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        file.truncate(start)
        raise


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        DamagedFile: the file cannot be read, or is something else: cut off, nested beyond measure, not in UTF-8.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DamagedFile(f"{path}: cannot be read: {reason(error)}") from error
    except RecursionError:
        raise DamagedFile(f"{path}: not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise DamagedFile(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise DamagedFile(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value
