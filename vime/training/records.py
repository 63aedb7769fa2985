"""What a rank tells the orchestration. Importable without torch or Megatron, so that the driver stays small."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vime.weights.plan import WeightPlan

__all__ = ["Export", "StartInfo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartInfo:
    """What the orchestration wants to know of a rank that is ready."""

    start_rollout_id: int
    dp_size: int
    dp_rank: int
    is_reporter: bool  # the one rank whose metrics are recorded and whose weights are exported
    dtype: str  # of the weights, as torch calls it
    resumed_from: str | None  # the folder of the checkpoint that the run goes on from
    state: dict[str, Any] | None  # what else was saved in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The weights as the engines read them: in one of these two places, until the next export overwrites them."""

    plan: WeightPlan
    path: str = ""  # of the shared buffer, for other processes on this machine
    handles: Mapping[str, str] = field(default_factory=dict)  # of a copy on each device, by the device's name
