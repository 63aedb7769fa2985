"""Calls one custom function on synthetic values, as a run would, and collects what is wrong with it.

Nothing here needs a GPU, Ray, vLLM or Megatron.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from vime.config import Args
from vime.data.jsonl import Row
from vime.errors import UserError
from vime.plugins.calling import OutOfTime, Raised, guarded, in_time, raised
from vime.plugins.changes import changes
from vime.plugins.contract import Contract, Function, WrongAnswer, shown
from vime.plugins.hook import users_traceback
from vime.plugins.loading import accepted_keywords
from vime.plugins.loop_watch import watched
from vime.rollout.tasks import event_loop

DEADLINE_S = 60.0
"""Of one call of a coroutine function; a plain function cannot be interrupted."""

LONG_S = 0.05
"""That a step of a coroutine should not take."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Of an object, in its repr: what differs by that alone is told once."""


class Trial:
    """One function under test. A context manager: a coroutine function meets one event loop, as in a run.

    Args:
        args: the flat view that the function gets.
        rows: of the user's own data, for functions that read labels or metadata.
    """

    def __init__(self, function: Function, contract: Contract, args: Args, rows: Sequence[Row] = ()) -> None:
        self.function, self.contract, self.args, self.rows = function, contract, args, rows
        self.tracebacks: list[str] = []
        self.calls = 0
        self._blocked: list[float] = []  # seconds, of each call that kept the event loop for long
        self._found: dict[str, list[str]] = {}  # problem → cases

    def __enter__(self) -> Trial:
        self._stack = ExitStack()
        self._runner = self._stack.enter_context(event_loop())
        self._warnings = self._stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", message=".*was never awaited")
        self._runner.get_loop().set_exception_handler(self._left_behind)
        return self

    def __exit__(self, *_: object) -> None:
        gc.collect()  # a coroutine that nobody awaited says so when it goes
        for warning in self._warnings:
            self._say("", f"calls a coroutine function without await: {str(warning.message).splitlines()[0]}")
        self._stack.close()

    def _left_behind(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What the event loop tells of tasks that nobody waits for. A session that stays open is no fault in a run."""
        error = context.get("exception")
        if isinstance(error, Exception):
            self._say("", f"left a task behind that {raised(error)}")

    def run(self) -> list[str]:
        """The whole trial; what is wrong, one line each."""
        with self:
            self.contract.trial(self)
        return self.problems

    @property
    def problems(self) -> list[str]:
        """One line for each thing that is wrong, with the first case in which it showed."""
        return [problem + _where(cases) for problem, cases in self._found.items()]

    @property
    def doubts(self) -> list[str]:
        """One line for each thing that is no mistake, but seldom meant."""
        if len(self._blocked) < 2:  # once, a module may have been imported
            return []
        return [
            f"kept the event loop for up to {max(self._blocked):.2g} s in {len(self._blocked)} of {self.calls} calls: "
            "nothing else is generated or graded meanwhile; await asyncio.to_thread(...) for what takes long"
        ]

    @contextmanager
    def case(self, name: str, unchanged: Callable[[], Mapping[str, Any]] = dict) -> Iterator[None]:
        """One call and the reading of its answer; what goes wrong inside becomes a problem.

        Args:
            unchanged: gives what the function must leave as it is, by the names that messages use.
        """
        before = copy.deepcopy(unchanged())
        try:
            with guarded():
                yield
        except Raised as failed:  # also where it is an answer of the user's own class that cannot be read
            error = failed.error
            self._say(name, str(error) if isinstance(error, UserError) else raised(error))
            return
        for change in changes(before, unchanged()):
            self._say(name, f"must not change {change}")

    def call(self, *arguments: Any, function: Function | None = None, **keywords: Any) -> Any:
        """What the function (or a method of what it made) returns.

        Optional keyword arguments go only to functions which name them.

        Raises:
            WrongAnswer: it raised, took too long, or returned something that should have been awaited.
        """
        self.calls += 1
        called = function or self.function
        for name in set(keywords) & set(self.contract.optional):
            if not accepted_keywords(called, (name,)):
                del keywords[name]
        try:
            if is_coroutine_function(called):
                answer, blocked = self._runner.run(watched(in_time(lambda: called(*arguments, **keywords), DEADLINE_S)))
                self._blocked += [blocked] if blocked > LONG_S else []
            else:
                with guarded():
                    answer = called(*arguments, **keywords)
        except OutOfTime:
            raise WrongAnswer(f"did not return within {DEADLINE_S:g} s") from None
        except Raised as failed:
            self.tracebacks.append(users_traceback(failed.error))
            raise WrongAnswer(raised(failed.error)) from failed.error
        if inspect.isawaitable(answer):
            if inspect.iscoroutine(answer):
                answer.close()
            raise WrongAnswer(f"returned {shown(answer)}, which nobody awaits: write await before the call")
        return answer

    def run_coroutine(self, coroutine: Any) -> Any:
        """Runs a coroutine of the trial itself in the event loop that the function meets."""
        return self._runner.run(coroutine)

    def _say(self, case: str, problem: str) -> None:
        self._found.setdefault(_ADDRESS.sub("", problem), []).append(case)


def is_coroutine_function(function: Function) -> bool:
    """Whether calling it gives a coroutine: async def, or an object with such a __call__."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _where(cases: list[str]) -> str:
    named = [case for case in cases if case]
    if not named:
        return ""
    more = f" and {len(named) - 1} more cases" if len(named) > 2 else f" and for {named[1]}" if len(named) == 2 else ""
    return f" (for {named[0]}{more})"
