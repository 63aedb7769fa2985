"""Evaluation: named sets of prompts, answered under the weights of the moment."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vime.observe import scores
from vime.rewards.values import answer_rewards
from vime.rollout.runner import Runner
from vime.types import Group, Sample, SamplingParams, WeightVersion, mean

EvalData = Mapping[str, Mapping[str, Any]]
"""Name of the set → {"rewards": numbers of the graded answers, "by_prompt": the same, a list for each prompt,
"truncated": a bool each, "samples": all of them}. Children of one sample are one answer."""


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
    runner: Runner | None = None  # how answers are made and graded; None: as in rollouts

    def result(self, groups: Sequence[Group]) -> dict[str, Any]:
        """What one evaluation of the set gave. A sample whose grader failed has no reward."""
        by_prompt = [answer_rewards(group, self.score) for group in groups]
        samples = list(itertools.chain.from_iterable(groups))
        return {
            "rewards": list(itertools.chain.from_iterable(by_prompt)),
            "by_prompt": by_prompt,
            "truncated": [sample.truncated for sample in samples],
            "samples": samples,
        }


def eval_metrics(data: EvalData) -> dict[str, float]:
    """``eval/NAME`` and its details, and the versions of the weights that answered. What a custom evaluation leaves out
    is left out here."""
    metrics: dict[str, float] = {}
    for name, entry in data.items():
        metrics |= {f"eval/{name}{detail}": value for detail, value in _details(entry).items()}
    samples = [sample for entry in data.values() for sample in entry.get("samples") or []]
    versions = set(itertools.chain.from_iterable(sample.weight_versions for sample in samples))
    return metrics | version_metrics(versions)


def version_metrics(versions: Collection[WeightVersion]) -> dict[str, float]:
    """Which weights an evaluation is of: one version, or where they changed on the way the first and the last."""
    if not versions:
        return {}
    return {"eval/weight_version/min": float(min(versions)), "eval/weight_version/max": float(max(versions))}


def _details(entry: Mapping[str, Any]) -> dict[str, float]:
    """By the end of the metric's name; the mean reward has none."""
    rewards = [float(reward) for reward in entry["rewards"]]
    samples: list[Sample] = entry.get("samples") or []
    metrics = {"": mean(rewards)} | _spread(entry.get("by_prompt") or [])
    if entry.get("truncated"):
        metrics["-truncated_ratio"] = mean([float(flag) for flag in entry["truncated"]])
    if samples:
        metrics["-response_len"] = mean([float(sample.response_length) for sample in samples])
        metrics["-graded"] = float(len(rewards))
        metrics["-errors"] = float(_answers(samples) - len(rewards))
    return metrics


def _spread(by_prompt: scores.Prompts) -> dict[str, float]:
    """What the mean reward may be off by, and pass@k where prompts have several answers."""
    found = {"-ci95": scores.half_width(by_prompt)}
    rates = scores.pass_rates(by_prompt)
    for k, rate in rates.items() if len(rates) > 1 else ():
        found |= {f"-pass@{k}": scores.average(rate), f"-pass@{k}-ci95": scores.half_width(rate)}
    return {name: value for name, value in found.items() if value is not None}


def _answers(samples: Sequence[Sample]) -> int:
    """How many samples were drawn: children of one are one answer."""
    parents = [sample.parent_index for sample in samples if sample.parent_index is not None]
    return len(samples) - len(parents) + len(set(parents))
