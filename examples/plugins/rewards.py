"""Reward functions, and what can be made of rewards."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from vime.types import Sample


async def exact_and_short(args: Any, sample: Sample) -> float:
    """1 for an answer that ends with the label, and up to a tenth more for a short one."""
    if not sample.response.rstrip(" .").endswith(str(sample.label)):
        return 0.0
    return 1.0 + 0.1 * (1 - sample.response_length / args.rollout_max_response_len)


async def best_of_group(args: Any, samples: list[Sample]) -> list[float]:
    """With --group-rm: 1 for the shortest right answers of the group, 0 for the others."""
    right = [sample.response.rstrip(" .").endswith(str(sample.label)) for sample in samples]
    shortest = min((s.response_length for s, good in zip(samples, right, strict=True) if good), default=0)
    return [float(good and s.response_length == shortest) for s, good in zip(samples, right, strict=True)]


def rank_in_group(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Rewards by their rank within the group, from -1 to 1; equal rewards share a rank."""
    raw = [sample.score(args.reward_key) for sample in samples]
    groups: defaultdict[int | None, list[float]] = defaultdict(list)
    for sample, reward in zip(samples, raw, strict=True):
        groups[sample.group_index].append(reward)
    return raw, [_rank(reward, groups[s.group_index]) for s, reward in zip(samples, raw, strict=True)]


def centred_rows(args: Any, samples: list[Sample]) -> dict[str, list[Any]]:
    """One row a sample; rewards relative to the mean of the rollout. Samples without a reward stay, but untrained."""
    scores = [sample.score(args.reward_key) if sample.reward is not None else None for sample in samples]
    known = [score for score in scores if score is not None]
    mean = sum(known) / max(len(known), 1)
    masks = [sample.loss_mask or [1] * sample.response_length for sample in samples]
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [0.0 if score is None else score - mean for score in scores],
        "raw_reward": [score or 0.0 for score in scores],
        "loss_masks": [[0] * len(mask) if score is None else mask for mask, score in zip(masks, scores, strict=True)],
    }


def _rank(reward: float, group: list[float]) -> float:
    below, above = sum(other < reward for other in group), sum(other > reward for other in group)
    return (below - above) / max(len(group) - 1, 1)
