"""The weights that engines sample with, kept until what they sampled is trained on (--keep-old-actor)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vime.training.weight_sets import WeightSets
from vime.types import WeightVersion

__all__ = ["SampledWeights"]


class SampledWeights:
    """Copies of the actor by weight version, in host memory; versions of the same weights share one.

    Between two syncs there is one. Where the next rollout is sampled while this one is trained on, there are two: those
    that the batch comes from, and those that the engines have by now. While the actor does not learn, there is one.

    Args:
        version: of the engines before the next export.
    """

    def __init__(self, sets: WeightSets, version: WeightVersion) -> None:
        self._sets, self._version = sets, version
        self._kept: list[WeightVersion] = []  # of each set the first version that has it
        self._is_kept = False  # whether the newest set has the present weights

    def exported(self, version: WeightVersion | None = None) -> None:
        """The engines get the present weights, as that version, by default the next one.

        Some may get it once more, while the weights are the same.
        """
        self._version = self._version + 1 if version is None else version
        if not self._is_kept:
            self._sets.keep(_name(self._version))
            self._kept.append(self._version)
            self._is_kept = True

    def moved(self) -> None:
        """The present weights have become others."""
        self._is_kept = False

    @contextmanager
    def use(self, version: WeightVersion | None) -> Iterator[None]:
        """The model has the weights of that version inside the block; earlier ones are needed no more.

        Without a version, or for one that is not kept, the nearest that is: the newest, or the oldest. Without any
        export the model keeps its own.
        """
        if not self._kept:
            yield
            return
        while len(self._kept) > 1 and (version is None or self._kept[1] <= version):
            self._sets.drop(_name(self._kept.pop(0)))
        with self._sets.use(_name(self._kept[0])):
            yield


def _name(version: WeightVersion) -> str:
    return f"sampled by version {version}"
