"""Advantage estimators by their name in ``--advantage-estimator``; one estimator a file."""

from __future__ import annotations

from vime.algorithms.advantages.base import AdvantageEstimator, AdvantageSettings, PackedSamples
from vime.algorithms.advantages.grpo import Grpo
from vime.algorithms.advantages.ppo import Ppo

__all__ = ["AdvantageEstimator", "AdvantageSettings", "PackedSamples", "get", "names"]

_ESTIMATORS: dict[str, AdvantageEstimator] = {"grpo": Grpo(), "ppo": Ppo()}


def names() -> tuple[str, ...]:
    """The names that ``get`` knows."""
    return tuple(_ESTIMATORS)


def get(name: str) -> AdvantageEstimator:
    """The estimator of that name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in _ESTIMATORS:
        raise ValueError(f"unknown advantage estimator {name!r}, known are: {', '.join(names())}")
    return _ESTIMATORS[name]
