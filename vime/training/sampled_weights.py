"""The weights that engines sample with, kept until what they sampled is trained on (--keep-old-actor)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vime.training.weight_sets import WeightSets
from vime.types import WeightVersion

__all__ = ["SampledWeights"]


class SampledWeights:
    """Copies of the actor by weight version, in host memory.

    Between two syncs there is one. Where the next rollout is sampled while this one is trained on, there are two: those
    that the batch comes from, and those that the engines have by now.

    Args:
        version: of the engines before the next export.
    """

    def __init__(self, sets: WeightSets, version: WeightVersion) -> None:
        self._sets, self._version = sets, version
        self._kept: list[WeightVersion] = []

    def exported(self) -> None:
        """The engines get the present weights, as the next version."""
        self._version += 1
        self._sets.keep(_name(self._version))
        self._kept.append(self._version)

    @contextmanager
    def use(self, version: WeightVersion | None) -> Iterator[None]:
        """The model has the weights of that version inside the block; earlier ones are needed no more.

        Without a version, or for one that is not kept, the nearest that is: the newest, or the oldest. Without any
        export the model keeps its own.
        """
        if not self._kept:
            yield
            return
        oldest, newest = self._kept[0], self._kept[-1]
        chosen = newest if version is None else min(max(version, oldest), newest)
        for old in [kept for kept in self._kept if kept < chosen]:
            self._sets.drop(_name(old))
            self._kept.remove(old)
        with self._sets.use(_name(self._kept[0])):
            yield


def _name(version: WeightVersion) -> str:
    return f"sampled by version {version}"
