"""What the parts of a made-up world share: chance by identity, the trace, and what became of the samples."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tests.simulation.broadcast import FakeGroup
from tests.simulation.clock import TICK
from vime.types import RolloutBatch, WeightVersion, derive_seed

T = TypeVar("T")

MASK = (1 << 61) - 1


def mixed(*values: int) -> int:
    """A number that looks random and depends on all of ``values`` and their order."""
    state = 0x1F123BB5
    for value in values:
        state = ((state ^ value) * 0x9E3779B97F4A7C15) & MASK
        state ^= state >> 31
    return state


class Chance:
    """Random numbers that depend on whom they are for, never on when or in which order somebody asks."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def number(self, *identity: int | str) -> int:
        return derive_seed(self._seed, *identity)

    def fraction(self, *identity: int | str) -> float:
        """In [0, 1)."""
        return self.number(*identity) / 2**31

    def hits(self, probability: float, *identity: int | str) -> bool:
        return self.fraction(*identity) < probability

    def pick(self, options: Sequence[T], *identity: int | str) -> T:
        return options[self.number(*identity) % len(options)]

    def seconds(self, low: float, high: float, *identity: int | str) -> float:
        """A whole number of ticks."""
        return round((low + (high - low) * self.fraction(*identity)) / TICK) * TICK


@dataclass(frozen=True, kw_only=True)
class Training:
    """One call of the trainer."""

    batch: RolloutBatch
    trainings: int  # how many there had been before
    weights: int  # what it learned on


@dataclass(frozen=True, kw_only=True)
class Synced:
    """What the engines were given under one version."""

    weights: int
    trainings: int  # that had made them


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One set, answered."""

    rollout_id: int
    unfinished: int  # samples without an answer, or with half of one
    versions: frozenset[WeightVersion]  # of all its tokens
    newest: WeightVersion  # what the engines had in the end


GIB = 1 << 30


class Devices:
    """Memory that a rank of the trainer and an engine share on each device, where they take turns.

    Args:
        capacity_gib: of each device; None: they share none.
    """

    def __init__(self, count: int = 0, capacity_gib: int | None = None) -> None:
        self._capacity_gib = capacity_gib
        self._held: list[dict[str, int]] = [{} for _ in range(count)]  # GiB by what holds it

    def take(self, place: int, what: str, gib: int) -> None:
        if self._capacity_gib is None:
            return
        self._held[place][what] = gib
        if sum(self._held[place].values()) > self._capacity_gib:
            raise RuntimeError(f"device {place} of {self._capacity_gib} GiB has no room for all of {self._held[place]}")

    def free(self, place: int, *what: str) -> None:
        if self._capacity_gib is not None:
            for each in what:
                self._held[place].pop(each, None)

    def take_all(self, what: str, gib: int) -> None:
        for place in range(len(self._held)):
            self.take(place, what, gib)

    def free_all(self, what: str) -> None:
        for place in range(len(self._held)):
            self.free(place, what)

    def free_bytes(self) -> list[int]:
        return [((self._capacity_gib or 0) - sum(held.values())) * GIB for held in self._held]


@dataclass
class History:
    """What happened so far that counts: after a crash of the driver, what had happened up to its last checkpoint."""

    trainings: list[Training] = field(default_factory=list)
    syncs: dict[WeightVersion, Synced] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)  # of rollouts, in order
    evaluations: list[Evaluation] = field(default_factory=list)

    def copy(self) -> History:
        return History(
            list(self.trainings),
            dict(self.syncs),
            list(self.metrics),
            list(self.evaluations),
        )


@dataclass(frozen=True)
class Event:
    """One line of a trace."""

    life: int  # of the driver: how many it had before
    time: float  # virtual seconds in this life
    what: str
    details: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        told = " ".join(f"{name}={value}" for name, value in self.details)
        return f"{self.life} {self.time:10.4f}  {self.what:<18} {told}"


class World:
    """Chance, history and trace of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = Chance(seed)
        self.history = History()
        self.devices = Devices()
        self.group: FakeGroup | None = None  # over which the trainer sends weights
        self.shared: dict[str, int] = {}  # memory that the trainer shares with engines: path → weights
        self.life = 0
        self.trace: list[Event] = []

    def tell(self, what: str, **details: Any) -> None:
        time = asyncio.get_running_loop().time()
        self.trace.append(Event(self.life, time, what, tuple(details.items())))
