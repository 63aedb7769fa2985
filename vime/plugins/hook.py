"""A custom function in use: resolved once, called often, and named by whatever goes wrong in it."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from vime.errors import UserError
from vime.plugins.calling import OutOfTime, Raised, guarded, in_time, raised
from vime.plugins.contract import Function, WrongAnswer
from vime.plugins.loading import accepted_keywords

T = TypeVar("T")

OURS = str(Path(__file__).parent)

MOST_TRACEBACKS = 20
"""Of one function in one process: a reward that fails on every sample shall not fill the disk."""


class HookError(UserError):
    """A custom function raised, or broke its contract. One line names flag, function, and what it was called for."""


class Hook:
    """A custom function whose contract was checked.

    Args:
        flag: where it was given, e.g. "--custom-rm-path".
        log: file that gets the traceback of what it raises; None: no file.
    """

    def __init__(self, function: Function, flag: str, path: str, log: Path | None = None) -> None:
        self.function = function
        self.name = f"{flag} {path}"
        self._flag, self._path, self._log = flag, path, log
        self._logged = 0
        self._takes: dict[str, bool] = {}

    def takes(self, keyword: str) -> bool:
        """Whether the function names that optional argument."""
        if keyword not in self._takes:
            self._takes[keyword] = bool(accepted_keywords(self.function, (keyword,)))
        return self._takes[keyword]

    def method(self, instance: Any, name: str) -> Hook:
        """A method of what the function (a class) made."""
        return Hook(getattr(instance, name), self._flag, f"{self._path}.{name}", self._log)

    def call(self, *arguments: Any, about: str, read: Callable[[Any], T] = lambda answer: answer, **keywords: Any) -> T:
        """Calls a plain function.

        Args:
            about: what it is called for, e.g. the name of a sample.
            read: turns what it returned into what the caller wants; raises WrongAnswer.

        Raises:
            HookError: it raised, or its answer is wrong.
        """
        try:
            with guarded():
                return read(self.function(*arguments, **keywords))
        except Raised as failed:
            raise self.failure(failed.error, about) from failed.error

    async def acall(
        self,
        *arguments: Any,
        about: str,
        read: Callable[[Any], T] = lambda answer: answer,
        timeout_s: float | None = None,
        limit: str = "",
        **keywords: Any,
    ) -> T:
        """The same for a coroutine function, which may have a deadline.

        Args:
            limit: the flag that ``timeout_s`` comes from.
        """
        call = functools.partial(self.function, *arguments, **keywords)
        try:
            answer = await in_time(call, timeout_s)
            with guarded():
                return read(answer)
        except Raised as failed:
            raise self.failure(failed.error, about) from failed.error
        except OutOfTime:
            raise self.late(timeout_s, limit, about) from None

    def late(self, timeout_s: float | None, limit: str, about: str) -> HookError:
        """One line on a call that did not return by the deadline of the flag ``limit``."""
        return HookError(f"{self.name}: did not return within {limit} {timeout_s:g}, for {about}")

    def failure(self, error: BaseException, about: str) -> HookError:
        """One line on what the function raised or returned; the traceback goes to the log file."""
        return HookError(f"{self.name}: {self.explained(error)}, for {about}")

    def explained(self, error: BaseException) -> str:
        """What the function raised or returned, and where the log file with the traceback is."""
        if isinstance(error, WrongAnswer):
            return str(error)
        return raised(error) + (f", traceback in {self._log}" if self._write_traceback(error) else "")

    def _write_traceback(self, error: BaseException) -> bool:
        """Whether the log file has it now, or has enough of them."""
        if self._log is None:
            return False
        if self._logged < MOST_TRACEBACKS:
            try:
                self._log.parent.mkdir(parents=True, exist_ok=True)
                with self._log.open("a", encoding="utf-8") as file:
                    file.write(f"{self.name}\n{users_traceback(error)}\n")
            except OSError:
                return False  # another machine, or a full disk: the cause itself is in the message
            self._logged += 1
        return True


def users_traceback(error: BaseException) -> str:
    """The traceback without the frames that led to the function."""
    trace = start = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(OURS) and trace.tb_next is not None:
            start = trace.tb_next
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, start))
