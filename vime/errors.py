"""What went wrong: on the user's side, or with the engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class UserError(ValueError):
    """A mistake in flags, files or hooks.

    Its message is one clear line (one for each mistake) that names the file, row, flag or value and what would be
    right; commands print it without a traceback and exit with 1.
    """


class DamagedFile(UserError):
    """A file, named in the message, that is cut off or holds something that nobody wrote into it."""


class EngineError(RuntimeError):
    """An engine or the router did not do what it was asked. The message names it, the call and the reason."""


def last_line(text: str) -> str:
    """Where last words name the cause: below a traceback, or the end of a log."""
    return (text.strip() or "no reason is known").splitlines()[-1]


NAMED_IN_MESSAGES = 5


def check_same_model(folder: Path | str, problems: Sequence[str]) -> None:
    """Raises a UserError that names the first of the tensors by which a checkpoint differs, if there are any."""
    if problems:
        shown, rest = "; ".join(problems[:NAMED_IN_MESSAGES]), len(problems) - NAMED_IN_MESSAGES
        raise UserError(f"{folder} is of another model: {shown}" + (f"; {rest} more" if rest > 0 else ""))
