"""What a rule is. Each is a pure function of a Config; all are evaluated, and none hides another.

A rule meets configurations that are wrong in other ways: a required value may be None, and whatever was derived from it
too. It stays silent about what it cannot judge, because another rule speaks about that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vime.config.config import Config
from vime.config.flags import option

__all__ = ["Rule", "Violation", "is_given", "known", "option", "where_sampled"]


@dataclass(frozen=True, slots=True)
class Violation:
    """One line for the user. ``about`` names attributes: when one of them could not be read, the line is not shown."""

    message: str
    about: tuple[str, ...] = ()
    lacking: bool = False  # a run needs more than was given, and what was given is fine


Rule = Callable[[Config], Iterator[Violation]]


def is_given(config: Config, name: str) -> bool:
    """Whether somebody set that flag, and neither a default nor another flag did."""
    origin = config.origins.get(name, "default")
    return origin != "default" and not origin.startswith("derived")


def where_sampled(rule: Rule) -> Rule:
    """The rule, silent in fine-tuning: what it speaks of has no effect there, and a warning says so."""

    @functools.wraps(rule)
    def heard(config: Config) -> Iterator[Violation]:
        if not config.algorithm.is_sft:
            yield from rule(config)

    return heard


def known(*values: object) -> bool:
    """Whether no value is missing. (Fields are typed as they are in a valid Config, so None needs this detour.)"""
    return all(value is not None for value in values)
