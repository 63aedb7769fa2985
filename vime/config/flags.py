"""What one typed field of a section says about its flag.

A section is a frozen dataclass. Each field is one flag: its name in kebab case, its kind from the annotation, its help
and default from ``flag()``. Nothing else declares flags, so the parser, the help, the YAML reader and ``vime explain``
cannot disagree.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from vime.config.kinds import Kind, kind_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of vime itself."""

    section: str
    name: str  # as an attribute: rollout_batch_size
    kind: Kind
    help: str
    default: Any
    required: bool = False
    derived: str | None = None  # how the value comes about when it is not given
    secret: bool = False  # shown and stored as ***

    @property
    def option(self) -> str:
        return option(self.name)


def option(name: str) -> str:
    """rollout_batch_size → --rollout-batch-size"""
    return "--" + name.replace("_", "-")


def flag(
    default: T,
    *,
    help: str,  # noqa: A002
    secret: bool = False,
    choices: tuple[str, ...] = (),
    instead: Mapping[str, str] | None = None,
    repeats: bool = False,
) -> T:
    """A flag with a default. ``choices`` is for sets which are only known to a table; others are typed as Literal.

    Args:
        instead: values that are usual elsewhere, and why they cannot be given here.
        repeats: a flag that is given again adds to what it had; else the last one wins.
    """
    metadata = {"help": help, "secret": secret, "choices": choices, "instead": instead or {}, "repeats": repeats}
    if isinstance(default, dict):
        return typing.cast(T, dataclasses.field(default_factory=default.copy, metadata=metadata))
    return dataclasses.field(default=default, metadata=metadata)


def required(*, help: str) -> Any:  # noqa: A002
    """A flag without which nothing starts. Its attribute is None only while the rules look for what is missing."""
    return dataclasses.field(default=None, metadata={"help": help, "required": True})


def derived(rule: str, *, help: str) -> Any:  # noqa: A002
    """A flag that is computed from others (see ``derive.py``) when it is not given; ``rule`` says how."""
    return dataclasses.field(default=None, metadata={"help": help, "derived": rule})


def _kind(hint: Any, metadata: Mapping[str, Any]) -> Kind:
    kind = kind_of(hint, metadata.get("choices", ()))
    return dataclasses.replace(
        kind, instead=metadata.get("instead", {}), appends=kind.appends or metadata.get("repeats", False)
    )


def flags_of(section: str, cls: type) -> Iterator[Flag]:
    """The flags of one section class, in the order of its fields."""
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        default = item.default if item.default is not dataclasses.MISSING else {}
        yield Flag(
            section=section,
            name=item.name,
            kind=_kind(hints[item.name], item.metadata),
            help=item.metadata["help"],
            default=default,
            required=item.metadata.get("required", False),
            derived=item.metadata.get("derived"),
            secret=item.metadata.get("secret", False),
        )
