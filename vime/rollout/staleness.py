"""How old the weights are that sampled something, counted in trainings, and how old they may be.

A *version* of the weights counts syncs; the *staleness* of a token counts trainings: those between the weights that
sampled it and the training that uses it. Training number k, from 0, uses rollout k, so it has k trainings before it,
and a token of weights with t trainings behind them is k - t trainings stale in it. A sample is as stale as the stalest
of its trained tokens.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable
from typing import Any

from vime.types import Sample, WeightVersion

__all__ = ["WeightHistory", "oldest_version"]

KEPT = 1024
"""Syncs that are remembered; a group that is older than so many is as stale as can be."""


class WeightHistory:
    """Which version of the weights has how many trainings behind it."""

    def __init__(self) -> None:
        self._versions: list[WeightVersion] = []  # ascending, and so are their trainings
        self._trainings: list[int] = []
        self._changed = asyncio.Event()

    def synced(self, version: WeightVersion, trainings: int) -> None:
        """The engines have ``version`` from now on. After a resume it may be one that is known already."""
        keep = bisect.bisect_left(self._versions, version)
        self._versions = [*self._versions[:keep], version][-KEPT:]
        self._trainings = [*self._trainings[:keep], trainings][-KEPT:]
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def version(self) -> WeightVersion:
        """What the engines have; 0 before the first sync."""
        return self._versions[-1] if self._versions else 0

    @property
    def trainings(self) -> int:
        """Of the weights that the engines have."""
        return self.trainings_of(self.version)

    def trainings_of(self, version: WeightVersion) -> int:
        """Those of the nearest earlier version where this one is not known; 0 before all that are known."""
        place = bisect.bisect_right(self._versions, version)
        return self._trainings[place - 1] if place else 0

    def staleness(self, sample: Sample, rollout_id: int) -> int:
        """Of a sample that training ``rollout_id`` uses. 0 where nothing says which weights sampled it."""
        oldest = oldest_version(sample)
        return 0 if oldest is None else rollout_id - self.trainings_of(oldest)

    async def until(self, happened: Callable[[], bool]) -> None:
        """Returns when the condition holds; it is looked at now and after each sync."""
        while not happened():
            await self._changed.wait()

    def state_dict(self) -> dict[str, Any]:
        return {"versions": list(self._versions), "trainings": list(self._trainings)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._versions, self._trainings = list(state["versions"]), list(state["trainings"])


def oldest_version(sample: Sample) -> WeightVersion | None:
    """Of its trained tokens; None where there are none, or nothing is known of them."""
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * len(sample.weight_versions)
    return min((v for v, trained in zip(sample.weight_versions, mask, strict=True) if trained), default=None)
