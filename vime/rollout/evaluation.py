"""Evaluation: named sets of prompts, answered under the weights of the moment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vime.rewards.values import is_graded
from vime.types import Group, Sample, SamplingParams, mean

EvalData = Mapping[str, Mapping[str, Any]]
"""Name of the set → {"rewards": numbers of the graded samples, "truncated": a bool each, "samples": all of them}."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What an evaluation gave."""

    data: EvalData
    metrics: Mapping[str, float] = field(default_factory=dict)  # beside those that are made from the data


Evaluate = Callable[[int], Awaitable[Evaluated]]
"""rollout_id → what the evaluation gave; what ``--eval-function-path`` replaces."""


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """One named set of prompts and how to sample answers to them."""

    name: str
    groups: Callable[[], list[Group]]  # fresh samples each time
    sampling: SamplingParams
    score: Callable[[Sample], float]

    def result(self, samples: list[Sample]) -> dict[str, Any]:
        """What one evaluation of the set gave. A sample whose grader failed has no reward."""
        return {
            "rewards": [self.score(sample) for sample in samples if is_graded(sample, self.score)],
            "truncated": [sample.truncated for sample in samples],
            "samples": samples,
        }


def eval_metrics(data: EvalData) -> dict[str, float]:
    """``eval/NAME`` and its details. What a custom evaluation leaves out is left out here."""
    metrics: dict[str, float] = {}
    for name, entry in data.items():
        rewards = [float(reward) for reward in entry["rewards"]]
        samples: list[Sample] = entry.get("samples") or []
        metrics[f"eval/{name}"] = mean(rewards)
        if entry.get("truncated"):
            metrics[f"eval/{name}-truncated_ratio"] = mean([float(flag) for flag in entry["truncated"]])
        if samples:
            metrics[f"eval/{name}-response_len"] = mean([float(sample.response_length) for sample in samples])
            metrics[f"eval/{name}-graded"] = float(len(rewards))
            metrics[f"eval/{name}-errors"] = float(len(samples) - len(rewards))
    return metrics
