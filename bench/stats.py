"""Repeated measurements: the spread of each side, and of the ratio of the two."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes of at least one value."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a spread needs at least one value")

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def to_json(self) -> dict[str, Any]:
        """Rounded to six significant digits, which is more than a clock tells."""
        numbers = {"median": self.median, "min": min(self.values), "max": max(self.values)}
        return {name: rounded(value) for name, value in numbers.items()} | {"values": [rounded(v) for v in self.values]}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides that did the same work by turns; the i-th values of both belong together."""

    ours: Spread
    theirs: Spread

    @property
    def ratio(self) -> Spread:
        """Of each pair, so that what slowed the machine for both cancels."""
        return Spread(tuple(a / b for a, b in zip(self.ours.values, self.theirs.values, strict=True)))

    def to_json(self, *, ours: str, theirs: str, unit: str) -> dict[str, Any]:
        """``ours`` and ``theirs`` name the sides, ``unit`` is that of their values."""
        return {
            "value": rounded(self.ratio.median),
            "ratio": self.ratio.to_json(),
            "unit": unit,
            ours: self.ours.to_json(),
            theirs: self.theirs.to_json(),
        }


def by_turns(sides: Mapping[str, Callable[[], float]], *, turns: int, warm_ups: int = 0) -> dict[str, Spread]:
    """Calls all sides by turns, in their order, and returns what each gave after the first ``warm_ups`` turns."""
    values: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(warm_ups + turns):
        for name, side in sides.items():
            values[name].append(side())
            print(f"{name}: {values[name][-1]:.5g}", file=sys.stderr, flush=True)  # for the log of the measure
    return {name: Spread(tuple(found[warm_ups:])) for name, found in values.items()}


def rounded(value: float) -> float:
    return float(f"{value:.6g}")
