"""Where the time of a run goes.

Phases may overlap (generation of the next rollout during training) and nest (rewards within generation). A second in
which several phases run counts for each of them in ``seconds``, and once in the overhead share.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["PhaseTimer", "StepTimes"]

WORK = frozenset({"generate", "reward", "train", "sync"})
"""What a step is for."""

APART = frozenset({"start", "evaluate"})
"""What belongs to no step: a second in which nothing but this runs counts neither as work nor as overhead."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of one step, in seconds."""

    seconds: Mapping[str, float]  # by phase
    wall: float  # since the last lap
    work: float  # during which at least one phase of WORK ran
    apart: float  # during which nothing but start-up or evaluation ran

    @property
    def step(self) -> float:
        """Wall time of the step, without start-up and evaluations."""
        return self.wall - self.apart

    @property
    def overhead_share(self) -> float:
        """The share of the step in which no work was done: saving, conversion, bookkeeping; 0 of an empty step."""
        return 1 - self.work / self.step if self.step > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        by_phase = {f"perf/phase_time/{name}": seconds for name, seconds in self.seconds.items()}
        return {"perf/step_time": self.step, "perf/overhead_share": self.overhead_share, **by_phase}


class PhaseTimer:
    """Accounts every second since its construction to the phases that were running.

    Args:
        clock: seconds, from any origin; it must not run backwards.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self._running: Counter[str] = Counter()
        self._lap: defaultdict[str, float] = defaultdict(float)
        self._wall = self._work = self._apart = 0.0
        self._totals: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time of the block for ``name``, whichever way the block ends."""
        self._account()
        self._running[name] += 1
        try:
            yield
        finally:
            self._account()
            self._running[name] -= 1

    def lap(self) -> StepTimes:
        """Ends a step: the times since the last lap. Phases that are running go on and count in both steps."""
        self._account()
        times = StepTimes(dict(self._lap), self._wall, self._work, self._apart)
        self._lap = defaultdict(float)
        self._wall = self._work = self._apart = 0.0
        return times

    def totals(self) -> dict[str, float]:
        """Seconds by phase since construction, in the order in which phases first ran."""
        self._account()
        return dict(self._totals)

    def _account(self) -> None:
        """Books the time since the last call."""
        now = self._clock()
        elapsed, self._last = now - self._last, now
        running = {name for name, count in self._running.items() if count > 0}
        for name in sorted(running):
            self._lap[name] += elapsed
            self._totals[name] += elapsed
        self._wall += elapsed
        self._work += elapsed if running & WORK else 0.0
        self._apart += elapsed if running and running <= APART else 0.0
