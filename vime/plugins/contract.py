"""What a custom function is called with and what it must return: all that there is to know of one, in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vime.errors import UserError
from vime.plugins.calling import Raised, guarded

if TYPE_CHECKING:
    from vime.plugins.trial import Trial

Function = Callable[..., Any]

Side = Literal["rollout", "training"]
"""Where a function runs: in the driver, beside the sampling loop, or on the ranks of the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """One extension point.

    Its signature is checked before anything starts, ``trial`` calls it on synthetic values (``vime check-plugin``), and
    docs/en/get_started/customization.md is written from it.
    """

    flag: str  # --custom-rm-path
    side: Side
    purpose: str  # what one writes such a function for: a sentence
    when: str  # when, how often and on which processes it is called: a sentence
    returns: str  # what it returns or changes in place: a sentence
    arguments: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()  # keyword arguments that only functions which name them get
    is_async: bool | None = False  # None: a coroutine function or a plain one
    methods: Mapping[str, tuple[str, ...]] | None = None  # of a class: its methods and their arguments
    trial: Callable[[Trial], None]
    example: str  # a function that keeps the contract: package.module:function, under examples/

    @property
    def name(self) -> str:
        """The attribute of the flag in ``args``: custom_rm_path."""
        return self.flag.removeprefix("--").replace("-", "_")

    def __str__(self) -> str:
        words = [*self.arguments, *(f"{name}=..." for name in self.keywords)]
        return f"({', '.join(words)})"


class WrongAnswer(UserError):
    """What a custom function returned or did is not what its contract says. The message goes on after its name."""


def read_nothing(answer: Any) -> None:
    """The answer of a function that works in place.

    Raises:
        WrongAnswer: it returned something, which nobody would read.
    """
    if answer is not None:
        raise WrongAnswer(f"must change its arguments in place and return nothing, not {shown(answer)}")


def shown(value: Any) -> str:
    """A value for a message: its type, and what it is where that is short."""
    try:
        with guarded():
            text = repr(value)
    except Raised:
        return type(value).__name__
    return f"{type(value).__name__} {text}" if len(text) <= 60 and "\n" not in text else type(value).__name__
