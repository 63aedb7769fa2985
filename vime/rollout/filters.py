"""Filters of groups that a run can name by ``--dynamic-sampling-filter-path``."""

from __future__ import annotations

from typing import Any

from vime.algorithms.rewards import has_signal, zero_std_counts
from vime.plugins.answers import Kept
from vime.rewards.values import is_graded
from vime.types import Sample

__all__ = ["check_reward_nonzero_std"]


def check_reward_nonzero_std(args: Any, samples: list[Sample], **_: Any) -> Kept:
    """Keeps a group whose rewards differ, so that there is something to learn from comparing them.

    They differ when their standard deviation, in float64, is above 1e-6. Samples without a reward say nothing. The
    reason of a drop has the reward that all samples got, to one decimal, so that what is always solved and what never
    is are counted apart. Dynamic sampling of DAPO, https://arxiv.org/abs/2503.14476, equation 11.
    """

    def score(sample: Sample) -> float:
        return sample.score(args.reward_key)

    rewards = [score(sample) for sample in samples if is_graded(sample, score)]
    if not rewards:
        return Kept(keep=False, reason="no_reward")
    if has_signal(rewards):
        return Kept(keep=True)
    (reward,) = zero_std_counts(rewards, [0] * len(rewards))
    return Kept(keep=False, reason=f"zero_std_{reward}")
