"""Flags of Megatron, vLLM and vllm-router, from committed manifests: none of the three is imported.

``tools/make_flag_manifests.py`` writes the manifests; a test compares them with what is installed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Literal

from vime.config.kinds import BY_NAME, Kind, Words, choice, list_of

Program = Literal["megatron", "vllm", "router"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFlag:
    """One entry of a manifest. Names are without dashes and without our prefix."""

    flag: str
    dest: str
    kind: str  # a key of kinds.BY_NAME, or "object" where no word can give the value
    list: bool = False  # takes several words
    append: bool = False  # may be repeated
    negatable: bool = False  # has a --no- form
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    default: str = ""  # as Python writes it; empty where it is long
    help: str = ""

    @property
    def value_kind(self) -> Kind:
        """How its value is read. Another program's None may always be given, as YAML's null."""
        kind = choice(self.choices) if self.choices else BY_NAME[self.kind]
        if self.list or self.append:
            kind = replace(list_of(kind), words=Words.MANY if self.list else Words.ONE, appends=self.append)
        return replace(kind, optional=True)


@functools.cache
def manifest(program: Program) -> Mapping[str, ForeignFlag]:
    """Every flag of a program, by name; aliases too."""
    text = (resources.files(__package__) / f"{program}.json").read_text(encoding="utf-8")
    flags: dict[str, ForeignFlag] = {}
    for item in json.loads(text):
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in item.items()}
        flag = ForeignFlag(**values)
        flags |= dict.fromkeys((flag.flag, *flag.aliases), flag)
    return flags


def command_words(program: Program, values: Mapping[str, Any]) -> Iterator[str]:
    """The command line that gives ``values`` (by dest, as in ``config.vllm``) to the program itself."""
    by_dest = {flag.dest: flag for flag in manifest(program).values()}
    for dest, value in values.items():
        flag = by_dest[dest]
        if isinstance(value, bool):
            if value or flag.negatable:
                yield f"--{flag.flag}" if value else f"--no-{flag.flag}"
        elif flag.append and not flag.list:
            for each in value:
                yield from (f"--{flag.flag}", _word(each))
        elif value is not None:
            yield f"--{flag.flag}"
            yield from map(_word, value if flag.list else [value])


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
