"""Rules that a configuration must keep. Each is a pure function; all are evaluated, and none hides another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vime.config.config import OWN_FLAGS, Config


@dataclass(frozen=True, slots=True)
class Violation:
    """One line for the user, and the attributes it is about (it is not shown when one of these could not be read)."""

    message: str
    about: tuple[str, ...] = ()


Rule = Callable[[Config], Iterator[Violation]]


def required_flags(config: Config) -> Iterator[Violation]:
    values = config.flat()
    for name, flag in OWN_FLAGS.items():
        if flag.required and values[name] is None:
            yield Violation(f"{flag.option} is required ({flag.help})", (name,))


RULES: tuple[Rule, ...] = (required_flags,)
WARNINGS: tuple[Rule, ...] = ()
