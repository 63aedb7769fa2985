"""What a process of an engine needs to know to join the trainer's group. Importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Invitation", "SendReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """Where the trainer listens for the members of one group; its ranks are 0 for the trainer, 1 and on for others."""

    address: str
    port: int
    secret: str  # who does not know it is turned away
    world_size: int
    timeout_s: float  # of each step and operation

    def to_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """What became of a transmission. With ``failures`` the group is gone and another one must be made."""

    sent_bytes: int
    seconds: float
    failures: Mapping[int, str] = field(default_factory=dict)  # ranks that are to blame → why
    interrupted: str = ""  # why not everything was sent, if it was not
