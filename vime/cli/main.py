"""``vime COMMAND …``: finds the command, and turns users' mistakes into one line each."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from vime.errors import UserError

COMMANDS: Mapping[str, str] = {
    "doctor": "check that this machine has what vime, or a run, needs",
    "explain": "show every value of a configuration and where it comes from",
    "data": "look at prompts as the model will see them",
    "grade": "grade answers from the command line",
    "check-plugin": "try your custom functions on synthetic values",
}
"""Name of a module in ``vime.cli`` (a dash for an underscore) → what it is for. A command is imported when it runs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code: 0 well, 1 something is wrong, 2 no such command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    name, *rest = words
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"error: vime has no command {name!r}{hint}\n{usage()}", file=sys.stderr)
        return 2
    sys.path.insert(0, os.getcwd())  # as python FILE.py does, so that custom functions are found
    return guarded(load(name), rest)


def load(name: str) -> Callable[[Sequence[str]], int]:
    """The ``main`` of a command's module."""
    command: Callable[[Sequence[str]], int] = importlib.import_module(f"vime.cli.{name.replace('-', '_')}").main
    return command


def guarded(command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Runs a command; a user's mistake is printed, one a line, and gives 1."""
    try:
        return command(argv)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, e.g. `head`, has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives until the interpreter ends
        return 0


def usage() -> str:
    """What the commands are."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(["usage: vime COMMAND ...", "", *lines])
