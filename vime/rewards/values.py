"""What reward functions return, as a Grade and as the reward of a Sample."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vime.metadata import BadMetadata, checked
from vime.rewards.equality import one_line
from vime.types import Grade, GradeStatus, InvalidSample, NotFinite, Sample, as_float, mean

Score = Callable[[Sample], float]
"""The reward of a sample as one number; ``Sample.score`` with the run's key."""


class RewardFailed(RuntimeError):
    """Why there is no reward, on one line, without the names of function and sample."""


def set_value(sample: Sample, value: Any, reward_key: str | None) -> None:
    """Puts a reward (a number, a dict or a Grade) on the sample.

    Further values of a Grade (dapo's ``acc`` and ``pred``) make the reward a dict where ``reward_key`` asks for one of
    them; without it the reward is the score.

    Raises:
        RewardFailed: it is none of these, or not finite, or the dict lacks ``reward_key``.
    """
    if isinstance(value, Grade):
        _set_grade(sample, replace(value, extra=_kept(value.extra)), reward_key)
    elif isinstance(value, Mapping):
        score, values = _pick(value, reward_key), _kept(value)
        _set(sample, Grade(score=score, extra=values), {**values, str(reward_key): score})
    else:
        score = to_number(value)
        _set(sample, Grade(score=score), score)


def set_error(sample: Sample, detail: str) -> None:
    """Marks the sample as ungraded, which is not the same as a reward of 0."""
    sample.grade, sample.reward = Grade.error(one_line(detail, 500)), None


def is_graded(sample: Sample, score: Score = Sample.score) -> bool:
    """Whether the sample has a reward to train on. A Grade that is an error is none, and a failed sample has none."""
    failed = sample.grade is not None and sample.grade.status is GradeStatus.ERROR
    return sample.reward is not None and not failed and sample.ended_well and not is_not_finite(sample, score)


def is_not_finite(sample: Sample, score: Score = Sample.score) -> bool:
    """Whether the reward is a number that cannot be trained on. What is no number at all is told when it is used."""
    try:
        if sample.reward is not None:
            score(sample)
    except NotFinite:
        return True
    except InvalidSample:
        return False
    return False


def answer_rewards(samples: Sequence[Sample], score: Score = Sample.score) -> list[float]:
    """The reward of each answer that has one. Children of one sample are one answer, with the mean of theirs."""
    answers: dict[tuple[str, int], list[float]] = {}
    for place, sample in enumerate(samples):
        if is_graded(sample, score):
            own = sample.parent_index is None
            key = ("sample at", place) if own else ("children of", sample.parent_index or 0)
            answers.setdefault(key, []).append(score(sample))
    return [mean(rewards) for rewards in answers.values()]


def to_number(value: Any) -> float:
    """A reward as a finite float; True is 1.0.

    Raises:
        RewardFailed: it is no number, or not finite.
    """
    if not isinstance(value, numbers.Real):
        raise RewardFailed(f"the reward must be a number, not {one_line(repr(value), 80)}")
    number = as_float(value)
    if not math.isfinite(number):
        raise RewardFailed(f"the reward must be finite, not {number}")
    return number


def _set_grade(sample: Sample, grade: Grade, reward_key: str | None) -> None:
    if grade.score is None:
        sample.grade, sample.reward = grade, None
    elif grade.extra and reward_key is not None:
        found = {"score": grade.score, **grade.extra}
        _set(sample, grade, {**found, reward_key: _pick(found, reward_key)})
    else:
        _set(sample, grade, grade.score)


def _kept(values: Mapping[str, Any]) -> dict[str, Any]:
    """Further values of a reward are kept with the sample, as its metadata is."""
    try:
        return checked(values, "the reward")
    except BadMetadata as error:
        raise RewardFailed(str(error)) from None


def _pick(found: Mapping[str, Any], reward_key: str | None) -> float:
    if reward_key is None:
        raise RewardFailed(
            f"the reward is a dict with {sorted(map(str, found))}; name the key to train on by --reward-key"
        )
    if reward_key not in found:
        raise RewardFailed(f"the reward has no key {reward_key!r} (--reward-key), only {sorted(map(str, found))}")
    return to_number(found[reward_key])


def _set(sample: Sample, grade: Grade, reward: float | dict[str, Any]) -> None:
    sample.grade, sample.reward = grade, reward
