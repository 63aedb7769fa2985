"""The last fenced block of the response as a Python program, run against tests in the sandbox.

In a dialogue that is the last block of the last turn, or where that has none, of the whole dialogue.

How tests are written: ``code_tests``. All of them must pass for a 1, or the score is the fraction that does
(``--rm-code-score``, or ``metadata["code_score"]`` of a row). Further keys of the metadata: ``time_limit_s`` and
``memory_limit_mib`` of one test.

A program that is slow, crashes or hangs fails its test. An answer is an error only where nobody knows how good it is:
the sandbox failed, the tests cannot be read, or there are more of them than the grader's deadline lets us run.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vime.metadata import multi_turn_of
from vime.rewards.code_tests import BadTests, Check, Test, how_it_ended, tests_of
from vime.rewards.extract import after_thinking
from vime.rewards.wire import DEADLINE_VARIABLE
from vime.sandbox import TOKEN_VARIABLE, Limits, LocalSandbox, Outcome, RemoteSandbox, Result, Sandbox, SandboxError
from vime.types import Grade, GradeStatus

SCORES = ("all", "fraction")
SCORE_VARIABLE, SANDBOX_VARIABLE = "VIME_CODE_SCORE", "VIME_CODE_SANDBOX"
"""What of the run's settings reaches the graders' processes, by environment."""

_FENCE = re.compile(r"^(?P<indent>[ \t]*)```(?P<behind>[^\n`]*)(?:\n|\Z)", re.MULTILINE)
_CLOSES = re.compile(r"\s*(<[^>]*>\s*)?")
"""What may stand behind a closing fence: the token that ends a turn, where responses are written with these."""

_TIME_LIMIT_S, _MEMORY_LIMIT_MIB = 2.0, 512.0
_WALL_FACTOR = 3.0  # a busy machine is not the program's fault
_RESERVE = 0.15  # of the deadline, for all that is not a test
_WAITING = 0.25  # of the deadline, for a service that is busy
_START_S = 30.0  # for a service to come up at the start of a run
_NO_DEADLINE_S = 600.0  # where nobody set one


def grade(response: str, label: str | None, metadata: Mapping[str, Any]) -> Grade:
    answer = multi_turn_of(metadata).get("answer") or ""  # of a dialogue, the last turn
    program = last_block(answer)
    if program is None:
        program = last_block(after_thinking(response))
    if program is None:
        return Grade(score=0.0, status=GradeStatus.INVALID, detail="there is no finished fenced block of code")
    return grade_answer(program, label, metadata)


def grade_answer(answer: str, label: str | None, metadata: Mapping[str, Any]) -> Grade:
    start = time.monotonic()
    try:
        terms = _Terms.of(metadata)
        return asyncio.run(_run(answer, tests_of(label, metadata), terms, start))
    except (BadTests, SandboxError) as error:
        return Grade.error(str(error))


def last_block(text: str) -> str | None:
    """The content of the last fenced block, indented as its fence is; None where there is none, or where it was not
    finished."""
    last, opened = None, None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif _CLOSES.fullmatch(fence["behind"]):
            last, opened = _unindented(text[opened.end() : fence.start()], len(opened["indent"])), None
    return last if opened is None else None


def _unindented(text: str, width: int) -> str:
    """Without the white space that its fence has before it."""
    return re.sub(rf"(?m)^[ \t]{{1,{width}}}", "", text) if width else text


async def check_sandbox(setting: str) -> None:
    """Tries the sandbox of ``--rm-code-sandbox`` at the start of a run; what it does not shut in is logged.

    Raises:
        SandboxError: no code can be run.
    """
    sandbox = _sandbox(setting, _START_S)
    try:
        result = await sandbox.run({}, ["python3", "-c", "print(1)"])
        if result.stdout != "1\n":
            raise SandboxError(f"--rm-code-sandbox {setting}: python3 does not run there: {how_it_ended(result)}")
    finally:
        if isinstance(sandbox, RemoteSandbox):
            await sandbox.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    fraction: bool
    time_limit_s: float
    memory_bytes: int

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> _Terms:
        score = metadata.get("code_score") or os.environ.get(SCORE_VARIABLE, SCORES[0])
        if score not in SCORES:
            raise BadTests(f"metadata code_score is one of {', '.join(SCORES)}, not {score!r}")
        return cls(
            fraction=score == "fraction",
            time_limit_s=_positive(metadata, "time_limit_s", _TIME_LIMIT_S),
            memory_bytes=int(_positive(metadata, "memory_limit_mib", _MEMORY_LIMIT_MIB) * (1 << 20)),
        )

    def limits(self, tests: int, left_s: float) -> Limits:
        """Of so many tests that run as one."""
        cpu_s = tests * self.time_limit_s
        return Limits(wall_s=min(_WALL_FACTOR * cpu_s, left_s), cpu_s=cpu_s, memory_bytes=self.memory_bytes)

    def was_cut_short(self, result: Result, limits: Limits) -> bool:
        """Whether it was our deadline that ended the program, before the time that one test has was over. (A program
        that used up its processor time ended before the wall-clock limit that it was given.)"""
        whole_s = _WALL_FACTOR * self.time_limit_s
        return result.status is Outcome.TIMEOUT and limits.wall_s < whole_s and result.seconds >= limits.wall_s


async def _run(program: str, tests: Sequence[Test], terms: _Terms, start: float) -> Grade:
    """Runs one test after the other, as long as they matter and the deadline lets us."""
    deadline_s = float(os.environ.get(DEADLINE_VARIABLE, _NO_DEADLINE_S))
    end = start + (1 - _RESERVE) * deadline_s
    tests = tests if terms.fraction else _together(tests)
    passed, failures = 0, list[str]()
    sandbox = _sandbox(os.environ.get(SANDBOX_VARIABLE, "auto"), waiting_s=_WAITING * deadline_s)
    try:
        for number, test in enumerate(tests):
            left_s, result = end - time.monotonic(), None
            if left_s >= terms.time_limit_s:
                limits = terms.limits(test.count, left_s)
                result = await test.run(program, sandbox, limits)
            if result is None or terms.was_cut_short(result, limits):
                if _was_slow(failures):
                    break
                return Grade.error(
                    f"only {number} of {len(tests)} tests fit into the deadline of {deadline_s:g} s "
                    f"(--rm-timeout-s), with {terms.time_limit_s:g} s for each (time_limit_s)"
                )
            failure = test.failure(result)
            if failure is None:
                passed += 1
                continue
            failures.append(failure)
            if not terms.fraction:
                break
    finally:
        if isinstance(sandbox, RemoteSandbox):
            await sandbox.close()
    score = passed / len(tests) if terms.fraction else float(passed == len(tests))
    detail = f"{passed} of {len(tests)} passed" + (f"; {failures[0]}" if failures else "")
    return Grade(score=score, detail=detail, extra={"passed": passed / len(tests)})


def _together(tests: Sequence[Test]) -> Sequence[Test]:
    """Checks that all have to pass are one: a start of Python less for each."""
    checks = [test for test in tests if isinstance(test, Check)]
    if len(checks) != len(tests):
        return tests
    return [Check("\n".join(check.code for check in checks), checks[0].word, count=len(checks))]


def _was_slow(failures: Sequence[str]) -> bool:
    """Whether the time went into a program that hung: then what is left undone has failed too."""
    return Outcome.TIMEOUT.value in failures


def _sandbox(setting: str, waiting_s: float) -> Sandbox:
    if setting.startswith(("http://", "https://")):
        return RemoteSandbox(setting, token=os.environ.get(TOKEN_VARIABLE), waiting_s=waiting_s)
    return _local(setting)


@functools.cache
def _local(isolation: Any) -> LocalSandbox:
    """One a process, so that what the kernel allows is tried once."""
    try:
        return LocalSandbox(isolation)
    except ValueError as error:
        raise SandboxError(f"--rm-code-sandbox: {error}") from None


def _positive(metadata: Mapping[str, Any], key: str, default: float) -> float:
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise BadTests(f"metadata {key} is a positive number, not {value!r}")
    return float(value)
