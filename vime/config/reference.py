"""What ``--help`` and docs/en/get_started/flags.md say of a flag: what it takes, its default, and what it does."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from vime.config.config import OWN_FLAGS
from vime.config.flags import Flag
from vime.config.kinds import Words
from vime.config.rules.supported import limit
from vime.config.sections import SECTIONS

WIDTH = 100

PASSED_THROUGH = """further:
  --config FILE.yaml
      The same names, in kebab case or with underscores; the command line wins.
  --vllm-X, --no-vllm-X, --router-X
      Every flag X of vLLM's API server and of vllm-router which vime does not decide itself.
  --X
      Every field of Megatron-core's configuration classes, and Megatron-LM's names for them."""


def help_text() -> str:
    """All flags of vime itself by section, and a word on those that are passed through."""
    lines: list[str] = []
    for section in SECTIONS:
        lines += [f"{section}:", *(line for flag in flags_in(section) for line in _lines(flag)), ""]
    return "\n".join([*lines, PASSED_THROUGH])


def flags_in(section: str) -> Iterator[Flag]:
    """Its flags, in the order of its fields."""
    return (flag for flag in OWN_FLAGS.values() if flag.section == section)


def takes(flag: Flag) -> str:
    """What has to follow the flag; empty for a switch."""
    return "" if flag.kind.words is Words.NONE else flag.kind.expected


def default(flag: Flag) -> str:
    """The default in words; empty where there is none, and of a switch that is off."""
    if flag.required:
        return "required"
    if flag.derived is not None:
        return f"default: {flag.derived}"
    if flag.default is True:
        return f"default: on; --no-{flag.option.removeprefix('--')} turns it off"
    return "" if flag.default in (None, (), {}) or flag.default is False else f"default: {_word(flag.default)}"


def meaning(flag: Flag) -> str:
    """What the flag does, and what of it this version refuses."""
    return " ".join(filter(None, (flag.help, limit(flag.name))))


def _lines(flag: Flag) -> list[str]:
    facts = f"({default(flag)})" if default(flag) else ""
    head = "  ".join(filter(None, (flag.option, takes(flag), facts)))
    return [*_wrapped(head, first=2, rest=10), *_wrapped(meaning(flag), first=6, rest=6)]


def _wrapped(text: str, *, first: int, rest: int) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=" " * first,
        subsequent_indent=" " * rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _word(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
