"""Advantage estimators by their name in ``--advantage-estimator``; one estimator a file, and each file is found."""

from __future__ import annotations

import importlib
import pkgutil

from vime.algorithms.advantages.base import (
    TAKEN,
    AdvantageEstimator,
    AdvantageSettings,
    PackedSamples,
    PolicyTokens,
    get,
    names,
)

__all__ = ["TAKEN", "AdvantageEstimator", "AdvantageSettings", "PackedSamples", "PolicyTokens", "get", "names"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
