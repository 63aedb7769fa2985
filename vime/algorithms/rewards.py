"""From raw rewards to group-relative rewards, in float64 and by group id.

The group of a sample is what its id says, never its position: groups may be uneven, interleaved or alone.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from numbers import Real

__all__ = [
    "EQUAL_STD",
    "check_finite",
    "group_normalize",
    "has_signal",
    "overlong_penalty",
    "unchanged",
    "zero_std_counts",
]

STD_EPSILON = 1e-6
"""Added to the standard deviation before the division."""

EQUAL_STD = 1e-6
"""Rewards whose standard deviation is not above this are taken as equal: what is left is rounding, which a division
by a tiny deviation would blow up to advantages of ordinary size."""


def group_normalize(
    rewards: Sequence[float],
    group_ids: Sequence[Hashable],
    *,
    std: bool = True,
    parents: Sequence[Hashable] | None = None,
) -> list[float]:
    """Rewards relative to their group: ``R - mean``, with ``std`` divided by ``std(R) + 1e-6``.

    Group-relative advantages of GRPO (https://arxiv.org/abs/2402.03300, section 4.1.2); without the division those of
    Dr.GRPO (https://arxiv.org/abs/2503.20783). The deviation is the one of a sample (n - 1). A group whose
    rewards are all equal, a group of one among them, becomes exactly 0.

    Children of one drawn sample share its one entry: each of c children weighs 1/c. So the mean is that over drawn
    samples, of which each has the mean of its children, and with equal rewards of siblings the deviation is that over
    drawn samples too: ``std² = Σ_i 1/c_i Σ_c (R_ic - mean)² / (n - 1)`` with n drawn samples, 1 in place of n - 1 where
    there is but one. Siblings that differ widen it, so that no advantage is larger than ``sqrt((n - 1) c)``.

    Args:
        rewards: one finite number a sample.
        group_ids: the group of each sample, in any order.
        std: whether to divide by the deviation of the group.
        parents: the drawn sample that each comes from; None: each is its own.

    Returns:
        One float a sample, in the order of ``rewards``.

    Raises:
        ValueError: a reward is not a finite number (the message names its position), or the lengths differ.
    """
    normalized = [0.0] * len(rewards)
    for positions in _groups(rewards, group_ids).values():
        weights = _weights([position if parents is None else parents[position] for position in positions])
        centred = _centred([rewards[position] for position in positions], weights)
        deviation = _deviation(centred, weights)
        if deviation <= EQUAL_STD:
            continue
        scale = deviation + STD_EPSILON if std else 1.0
        for position, value in zip(positions, centred, strict=True):
            normalized[position] = value / scale
    return normalized


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards of one group differ, so that group-relative advantages are not all 0."""
    check_finite(rewards)
    return not _equal(rewards)


def zero_std_counts(rewards: Sequence[float], group_ids: Sequence[Hashable]) -> dict[str, int]:
    """How many groups have no signal, by the reward that all their samples got.

    Args and errors as in ``group_normalize``.

    Returns:
        Rewards with one decimal, so that graded rewards do not make a name each (``{"0.0": 5, "1.0": 2}``).
    """
    groups = ([rewards[position] for position in positions] for positions in _groups(rewards, group_ids).values())
    return dict(Counter(_one_decimal(group[0]) for group in groups if _equal(group)))


def overlong_penalty(length: int, *, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """What an answer of that many tokens loses for coming near the limit: from 0 down to ``-factor``.

    0 up to ``max_length - buffer`` tokens, then falling evenly to ``-factor`` at ``max_length``, and no lower. Soft
    overlong punishment of DAPO, https://arxiv.org/abs/2503.14476, equation 13. To be added to the reward.

    Raises:
        ValueError: the buffer is not within 1 and ``max_length``.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"the buffer must be from 1 to the {max_length} tokens of the longest answer, not {buffer}")
    over = length - (max_length - buffer)
    return -factor * min(max(over / buffer, 0.0), 1.0)


def _groups(rewards: Sequence[float], group_ids: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """The positions of the samples of each group, both in the order in which they come."""
    if len(rewards) != len(group_ids):
        raise ValueError(f"{len(rewards)} rewards do not match {len(group_ids)} group ids")
    check_finite(rewards)
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for position, group_id in enumerate(group_ids):
        groups[group_id].append(position)
    return groups


def unchanged(rewards: Sequence[float]) -> list[float]:
    """The rewards as they are, for estimators that compare no answers; raises ValueError like ``check_finite``."""
    check_finite(rewards)
    return [float(reward) for reward in rewards]


def check_finite(rewards: Sequence[object]) -> None:
    """Raises ValueError for a reward that is not a finite number; the message names its position."""
    for position, reward in enumerate(rewards):
        if not (isinstance(reward, Real) and math.isfinite(reward)):
            raise ValueError(f"the reward at position {position} must be a finite number, not {reward!r}")


def _equal(rewards: Sequence[float]) -> bool:
    weights = [1.0] * len(rewards)
    return _deviation(_centred(rewards, weights), weights) <= EQUAL_STD


def _weights(parents: Sequence[Hashable]) -> list[float]:
    """1 for each parent, shared by its children."""
    children = Counter(parents)
    return [1.0 / children[parent] for parent in parents]


def _centred(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Each value less the weighted mean. Shifted by the first value beforehand, so that equal values give exactly 0."""
    shifted = [float(value) - float(values[0]) for value in values]
    mean = math.fsum(map(operator.mul, weights, shifted)) / math.fsum(weights)
    return [value - mean for value in shifted]


def _deviation(centred: Sequence[float], weights: Sequence[float]) -> float:
    """The standard deviation of a sample, whose size n is the sum of the weights (n - 1); 0 of a single value."""
    squares = math.fsum(weight * value * value for weight, value in zip(weights, centred, strict=True))
    return math.sqrt(squares / max(round(math.fsum(weights)) - 1, 1))


def _one_decimal(value: float) -> str:
    return f"{round(float(value), 1) + 0.0:.1f}"  # + 0.0: no "-0.0"
