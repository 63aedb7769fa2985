"""What speaks with the model: tools, a user, a game."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vime.types import Message

__all__ = ["Environment", "EpisodeFailed", "Turn"]


class EpisodeFailed(Exception):
    """The episode cannot go on through no fault of the model. Its sample gets the status FAILED: never trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the model said."""

    number: int  # 0 is the first
    text: str  # without the token that ends it, with other special tokens
    truncated: bool  # whether it was cut off by a limit on tokens
    last: bool = (
        False  # whether no other may follow: the model hears no answer, but without one the episode is complete
    )


class Environment(abc.ABC):
    """One for each episode."""

    @abc.abstractmethod
    async def respond(self, turn: Turn) -> Sequence[Message]:
        """What the model is told next, as messages of a chat; nothing: the episode is over.

        Raises:
            EpisodeFailed: something is broken.
        """

    def metadata(self) -> Mapping[str, float]:
        """What the metadata of the sample shall say of the episode: sums, which go on when an episode is continued."""
        return {}
