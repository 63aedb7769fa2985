"""Logs of our own."""

from __future__ import annotations

from typing import Any

from vime.types import Sample


def log_rollout(
    rollout_id: int, args: Any, samples: list[Sample], rollout_extra_metrics: dict[str, float], rollout_time: float
) -> bool:
    """Adds a metric to ours: how many answers name a number."""
    named = sum(any(character.isdigit() for character in sample.response) for sample in samples)
    rollout_extra_metrics["rollout/names_a_number"] = named / max(len(samples), 1)
    return False  # True would leave our metrics out of the record


def log_evaluation(rollout_id: int, args: Any, data: dict[str, Any], extra_metrics: dict[str, float]) -> bool:
    """Adds the worst reward of each data set."""
    for name, entry in data.items():
        extra_metrics[f"eval/{name}-worst"] = min(entry["rewards"], default=0.0)
    return False
