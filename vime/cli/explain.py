"""``vime explain FLAGS``: every value and its origin and what is doubtful, or all that is wrong, and then exits with 1.

``--table`` shows the values beside mistakes too; ``--json`` tells everything, for programs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from vime.config import Config, help_text, resolve
from vime.config.parse import Resolution, told, with_hooks_checked

OWN = ("--json", "--table")
"""Flags of the command itself."""


def main(argv: Sequence[str]) -> int:
    """Takes the flags of ``train.py``, ``--table`` and ``--json``."""
    if "-h" in argv or "--help" in argv:
        print(f"usage: vime explain FLAGS [--table | --json]\n\n{__doc__}\nThe flags are those of train.py:\n")
        print(help_text())
        return 0
    resolution = with_data_checked(with_hooks_checked(resolve([word for word in argv if word not in OWN])))
    if "--json" in argv:
        print(json.dumps(as_dict(resolution), indent=2, default=str))
    else:
        show(resolution, table="--table" in argv or not resolution.violations)
    return 1 if resolution.violations else 0


def with_data_checked(resolution: Resolution) -> Resolution:
    """The same, with what the start of a run would refuse of its data."""
    from vime.rollout.early import data_problems

    problems = data_problems(resolution.config, flags_are_right=not resolution.violations)
    return replace(resolution, violations=(*resolution.violations, *problems))


def as_dict(resolution: Resolution) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "config": resolution.config.to_dict(),
        "violations": list(resolution.violations),
        "warnings": list(resolution.warnings),
    }


def show(resolution: Resolution, *, table: bool) -> None:
    """Prints the table, if it is wanted, and then one line for each mistake or, without any, for each doubt."""
    if table and sys.stdout.isatty():
        show_rich(resolution.config)
    elif table:
        print("\n".join(plain_lines(resolution.config)))
    for line in told(resolution):
        print(line)
    if not table:
        print("(vime explain FLAGS --table shows every value all the same)")


def plain_lines(config: Config) -> Iterator[str]:
    """Aligned columns: flag, value, origin; an empty line after each section."""
    for section, entries in config.to_dict().items():
        yield f"[{section}]"
        flags = {name: (as_flag(name), as_word(entry["value"]), entry["origin"]) for name, entry in entries.items()}
        widths = [max(len(row[column]) for row in flags.values()) for column in (0, 1)]
        for flag, value, origin in flags.values():
            yield f"{flag:<{widths[0]}}  {value:<{widths[1]}}  {origin}"
        yield ""


def show_rich(config: Config) -> None:
    """The same on a terminal; what is not a default stands out."""
    from rich.table import Table
    from rich.text import Text

    from vime.observe.console import text_console

    console = text_console()
    for section, entries in config.to_dict().items():
        table = Table(title=section, title_justify="left", box=None, header_style="dim", pad_edge=False)
        for column in ("flag", "value", "origin"):
            table.add_column(column, overflow="fold")
        for name, entry in entries.items():
            style = "dim" if entry["origin"] == "default" else "bold"
            cells = (as_flag(name), as_word(entry["value"]), entry["origin"])
            table.add_row(*(Text(cell, style=style) for cell in cells))
        console.print(table)
        console.print()


def as_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def as_word(value: Any) -> str:
    """A value about as it would be written on the command line."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        return " ".join(as_word(each) for each in value) or "-"
    return json.dumps(value) if isinstance(value, dict) else str(value)
