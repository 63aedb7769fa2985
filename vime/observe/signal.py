"""Tells a person of rollouts that teach nothing: answers that no grader can read, and groups of equal rewards."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from vime.naming import rollout_name
from vime.rewards.values import Score, answer_rewards
from vime.types import GradeStatus, Group, Sample, Status

__all__ = ["SignalWatch"]

NEARLY_ALL = 0.9
"""From this share of invalid answers on a rollout is told of."""

SAY_AGAIN = 20
"""After so many rollouts the same is told again."""

SHOWN = 80
"""Characters of an answer that are shown."""

logger = logging.getLogger(__name__)


class SignalWatch:
    """Says in one line why there is little or nothing to learn from a rollout. The same reason is said once in
    ``SAY_AGAIN`` rollouts.

    Args:
        score: reads the reward of a graded sample.
        needs_spread: whether a group with equal rewards teaches nothing, as where rewards are compared within it.
        say: takes the line.
    """

    def __init__(self, score: Score, *, needs_spread: bool = True, say: Callable[[str], None] = logger.warning) -> None:
        self._score = score
        self._say = say
        self._needs_spread = needs_spread
        self._said: dict[str, int] = {}  # reason → the rollout of which it was said last

    def look(self, rollout_id: int, groups: Sequence[Group]) -> None:
        """Says what is the matter with the graded groups of a rollout, if anything is."""
        found = self._invalid(groups) or self._equal(groups)
        if found is None:
            return
        reason, line = found
        if rollout_id - self._said.get(reason, rollout_id - SAY_AGAIN) >= SAY_AGAIN:
            self._said[reason] = rollout_id
            self._say(f"warning: {rollout_name(rollout_id)}: {line}")

    def _invalid(self, groups: Sequence[Group]) -> tuple[str, str] | None:
        grades = [(sample.grade, sample) for sample in itertools.chain.from_iterable(groups)]
        invalid = [(grade.detail, sample) for grade, sample in grades if grade and grade.status is GradeStatus.INVALID]
        graded = sum(grade is not None and grade.status is not GradeStatus.ERROR for grade, _ in grades)
        if not invalid or len(invalid) < NEARLY_ALL * graded:
            return None
        ((reason, _),) = Counter(detail for detail, _ in invalid).most_common(1)
        example = next(sample for detail, sample in invalid if detail == reason)
        cut = sum(sample.status is Status.TRUNCATED for _, sample in invalid)
        return reason, (
            f"{len(invalid)} of {graded} answers cannot be graded: {reason or 'the grader gives no reason'}"
            f"{f' (cut at the length limit: {cut})' if cut else ''}; one begins: {_beginning(example)}"
        )

    def _equal(self, groups: Sequence[Group]) -> tuple[str, str] | None:
        rewards = [found for group in groups if len(found := answer_rewards(group, self._score)) > 1]
        if not self._needs_spread or not rewards or any(len(set(group)) > 1 for group in rewards):
            return None
        counts = Counter(group[0] for group in rewards).most_common(3)
        told = ", ".join(f"{reward:g} in {count}" for reward, count in counts)
        return "equal rewards", (
            f"nothing to learn from it: in each of {len(rewards)} groups all answers have the same reward ({told})"
        )


def _beginning(sample: Sample) -> str:
    text = " ".join(sample.response.split())
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "…")
