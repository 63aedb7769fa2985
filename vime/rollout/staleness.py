"""How old the weights are that sampled something, counted in trainings, and how old they may be.

A *version* of the weights counts syncs; the *staleness* of a token counts trainings: those between the weights that
sampled it and the training that uses it. Training number k, from 0, uses rollout k, so it has k trainings before it,
and a token of weights with t trainings behind them is k - t trainings stale in it. A sample is as stale as the stalest
of its trained tokens.
"""

from __future__ import annotations

import asyncio
import bisect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vime.types import Group, Sample, WeightVersion, mean

__all__ = ["Policy", "StalenessBound", "WeightHistory", "drop_metrics", "in_time"]

Policy = Literal["wait", "drop", "mask"]

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

    def advanced(self, version: WeightVersion, trainings: int) -> None:
        """The engines have ``version`` from now on, which has so many more trainings behind it than the last one."""
        self.synced(version, self.trainings + trainings)

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
        versions = sample.trained_versions
        return rollout_id - self.trainings_of(min(versions)) if versions else 0

    async def until(self, happened: Callable[[], bool]) -> None:
        """Returns when the condition holds; it is looked at now and after each sync."""
        while not happened():
            await self._changed.wait()

    def state_dict(self) -> dict[str, Any]:
        return {"versions": list(self._versions), "trainings": list(self._trainings)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._versions, self._trainings = list(state["versions"]), list(state["trainings"])


@dataclass(frozen=True, kw_only=True)
class StalenessBound:
    """How far sampling may run ahead of training: no training uses a token that is staler than allowed.

    A group starts only if it would be trained in time, were groups trained in the order in which they start. So many
    are under way at most, whatever the policy:

        (trainings of the engines' weights + max_staleness + 1 - rollout) * batch_size

    Groups differ in how long they take, and later ones may overtake. What then holds the bound is the policy: ``wait``
    lets a group overtake only while those that it leaves behind are still in time, so that a rollout waits for a
    straggler when it must; ``drop`` and ``mask`` wait for none, and see to what has become too stale.

    Args:
        batch_size: groups of a rollout.
        runs_ahead: whether sampling goes on while weights change. Where it does not, groups start as they like, and
            only ``drop`` and ``mask`` have an effect, on what an earlier rollout left unfinished.
    """

    history: WeightHistory = field(default_factory=WeightHistory)
    max_staleness: int = 0
    policy: Policy = "wait"
    batch_size: int = 1
    runs_ahead: bool = False

    async def admits(self, rollout_id: int) -> None:
        """Returns when what the engines would sample now is new enough for that rollout."""
        await self.history.until(lambda: rollout_id - self.history.trainings <= self.max_staleness)

    def may_start(self, rollout_id: int, places: int, deadlines: Sequence[int]) -> int:
        """How many more groups may start, where this rollout has so many places that are not taken, and groups of these
        deadlines are in flight."""
        if not self.runs_ahead:
            return sys.maxsize
        later = self.history.trainings + self.max_staleness - rollout_id
        return later * self.batch_size + places - self.claims(rollout_id, places, deadlines)

    def claims(self, rollout_id: int, places: int, deadlines: Sequence[int]) -> int:
        """For how many groups of these deadlines a place is held: with ``wait`` for all, else for none that would come
        too late."""
        if not self.runs_ahead or self.policy == "wait":
            return len(deadlines)
        return count_in_time(deadlines, rollout_id, places, self.batch_size)

    def deadline(self, group: Group) -> int:
        """The last rollout that may use a group which starts now."""
        if not self.runs_ahead:
            return sys.maxsize
        versions = [version for sample in group for version in sample.trained_versions]
        return self.history.trainings_of(min(versions, default=self.history.version)) + self.max_staleness

    def has_room(self, rollout_id: int, places: int, deadlines: Sequence[int]) -> bool:
        """Whether a group may be taken that leaves so many places of this rollout to groups of these deadlines."""
        return not self.runs_ahead or self.policy != "wait" or in_time(deadlines, rollout_id, places, self.batch_size)

    def is_late(self, group: Group, rollout_id: int) -> bool:
        """Whether a finished group must be sampled anew. With ``wait`` only what an earlier run left can be."""
        sends_back = self.policy == "drop" or (self.policy == "wait" and self.runs_ahead)
        return sends_back and any(self._is_stale(sample, rollout_id) for sample in group)

    def mask(self, groups: Iterable[Group], rollout_id: int) -> dict[str, float]:
        """Takes stale tokens out of the loss, with ``mask``; returns metrics."""
        if self.policy != "mask":
            return {}
        masks = [self._mask(sample, rollout_id) for group in groups for sample in group]
        trained = sum(before for before, _ in masks)
        return {"rollout/staleness/masked_ratio": sum(stale for _, stale in masks) / max(trained, 1)}

    def _mask(self, sample: Sample, rollout_id: int) -> tuple[int, int]:
        """Returns how many tokens were trained, and how many of them were stale."""
        before = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
        if not self._is_stale(sample, rollout_id):
            return sum(before), 0
        oldest = rollout_id - self.max_staleness  # trainings
        sample.loss_mask = [
            int(trained and self.history.trainings_of(version) >= oldest)
            for trained, version in zip(before, sample.weight_versions, strict=False)  # validated later
        ]
        return sum(before), sum(before) - sum(sample.loss_mask)

    def _is_stale(self, sample: Sample, rollout_id: int) -> bool:
        return self.history.staleness(sample, rollout_id) > self.max_staleness


def in_time(deadlines: Sequence[int], rollout_id: int, places: int, batch_size: int) -> bool:
    """Whether every group can be trained by its deadline, with ``places`` in this rollout and ``batch_size`` in each
    later one."""
    return count_in_time(deadlines, rollout_id, places, batch_size) == len(deadlines)


def count_in_time(deadlines: Sequence[int], rollout_id: int, places: int, batch_size: int) -> int:
    """The most groups that can be trained by their deadlines: the earliest first, without those that would be late. (No
    order does better: Jackson's rule, and Moore's for jobs that take equally long.)"""
    count = 0
    for deadline in sorted(deadlines):
        count += rollout_id + (max(count - places, -1) // batch_size) + 1 <= deadline
    return count


def drop_metrics(kept: Sequence[Group], late: Sequence[Group]) -> dict[str, float]:
    """How many came too late, and how much longer they are than those that did not: what is left is biased against long
    responses by so much."""
    metrics = {"rollout/staleness/dropped_ratio": len(late) / max(len(kept) + len(late), 1)}
    in_time, too_late = ([s.response_length for group in groups for s in group] for groups in (kept, late))
    if sum(in_time) and too_late:
        metrics["rollout/staleness/dropped_length_ratio"] = mean(too_late) / mean(in_time)
    return metrics
