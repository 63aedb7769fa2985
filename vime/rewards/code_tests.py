"""The tests of a programming task: how they are written in a data set, and how one is run on a program.

They stand in ``metadata["tests"]``, else in the label (as JSON, or as the code itself), in one of these forms:

==================================================  =============================================================
``{"inputs": ["1 2"], "outputs": ["3"]}``           standard input and the expected standard output of each test
``[{"input": "1 2", "output": "3"}, ...]``          the same
``["assert add(1, 2) == 3", ...]``                  Python code that raises where the program is wrong
``"assert add(1, 2) == 3"``                         one such test, of any number of lines
==================================================  =============================================================

``metadata["test_setup"]`` is code that stands before each test of the last two forms.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vime.sandbox import Limits, Outcome, Result, Sandbox

_PROGRAM = "solution.py"
_COMMAND = ("python3", "-u")
_CHECK = """\
import os
os.dup2(0, 99, inheritable=False)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
del os
import solution
globals().update((name, value) for name, value in vars(solution).items() if not name.startswith("__"))
{check}
__import__("sys").stdout.write("\\n" + __import__("os").fdopen(99).readline())
"""
"""The program finds nothing on standard input, which would otherwise hold the word."""


class BadTests(ValueError):
    """The tests of a row cannot be used; one line."""


class Test(Protocol):
    @property
    def count(self) -> int:
        """How many tests of the row it is."""

    async def run(self, program: str, sandbox: Sandbox, limits: Limits) -> Result: ...

    def failure(self, result: Result) -> str | None:
        """Why the program failed the test, in a few words; None where it passed."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The program gets ``stdin`` and has to print ``expected``; white space at the ends of lines does not matter."""

    stdin: str
    expected: str
    count: int = 1

    async def run(self, program: str, sandbox: Sandbox, limits: Limits) -> Result:
        return await sandbox.run({_PROGRAM: program}, [*_COMMAND, _PROGRAM], self.stdin, limits)

    def failure(self, result: Result) -> str | None:
        if not result.ok:
            return how_it_ended(result)
        return None if _lines(result.stdout) == _lines(self.expected) else "wrong output"


@dataclass(frozen=True, slots=True)
class Check:
    """Code that runs after the program, in its namespace, and raises where that is wrong.

    A program that ends by itself before the end of the check has not passed it: at the end a word is printed, which
    comes over a descriptor of its own. (A program that is written to cheat can find it, as it can read the check.)
    """

    code: str
    word: str
    count: int = 1

    async def run(self, program: str, sandbox: Sandbox, limits: Limits) -> Result:
        files = {_PROGRAM: program, "check.py": _CHECK.format(check=self.code)}
        return await sandbox.run(files, [*_COMMAND, "check.py"], self.word, limits)

    def failure(self, result: Result) -> str | None:
        if not result.ok:
            return how_it_ended(result)
        return None if result.stdout.endswith("\n" + self.word) else "it ended before the check did"


def tests_of(label: str | None, metadata: Mapping[str, Any]) -> list[Test]:
    """The tests of a row.

    Raises:
        BadTests: there are none, or they have none of the forms above.
    """
    value = metadata.get("tests")
    if value is None:
        value = label
    if isinstance(value, str):
        value = _parsed(value)
    setup = metadata.get("test_setup") or ""
    if not isinstance(setup, str):
        raise BadTests(f"metadata test_setup is code, not {_shown(setup)}")
    tests = _pairs(value) if isinstance(value, Mapping) else _listed(value, setup)
    if not tests:
        raise BadTests("there are no tests, neither in metadata tests nor in the label")
    return tests


def _parsed(text: str) -> Any:
    """JSON where it is that, else one piece of code."""
    if not text.strip():
        return []
    try:
        return json.loads(text)
    except ValueError:
        return [text]


def _pairs(value: Mapping[str, Any]) -> list[Test]:
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if set(value) != {"inputs", "outputs"} or not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence):
        raise BadTests(f"tests are an object with the lists inputs and outputs, not {_shown(value)}")
    if len(inputs) != len(outputs):
        raise BadTests(f"tests have {len(inputs)} inputs and {len(outputs)} outputs")
    return [_pair(*each) for each in zip(inputs, outputs, strict=True)]


def _listed(value: Any, setup: str) -> list[Test]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadTests(f"tests are a list, an object with inputs and outputs, or code, not {_shown(value)}")
    if all(isinstance(each, str) for each in value):
        return [Check(f"{setup}\n{each}", secrets.token_hex(8)) for each in value]
    for each in value:
        if not isinstance(each, Mapping) or set(each) != {"input", "output"}:
            raise BadTests(f'a test is code or an object {{"input": ..., "output": ...}}, not {_shown(each)}')
    return [_pair(each["input"], each["output"]) for each in value]


def _pair(stdin: Any, expected: Any) -> Test:
    if not isinstance(stdin, str) or not isinstance(expected, str):
        raise BadTests(f"input and output of a test are texts, not {_shown(stdin)} and {_shown(expected)}")
    return Pair(stdin, expected)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _shown(value: Any) -> str:
    return repr(value)[:80]


def how_it_ended(result: Result) -> str:
    """In a few words, where it did not end well."""
    if result.status is not Outcome.EXITED:
        return str(result.status.value)
    last: str = next((line for line in reversed(result.stderr.splitlines()) if line.strip()), "")
    return last.strip()[:200] or f"exit code {result.exit_code}"
