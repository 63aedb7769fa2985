"""On-policy distillation with a teacher on a server: it is asked about every sample that will be trained."""

from __future__ import annotations

from vime.ports import Teacher
from vime.rewards.values import set_error
from vime.rollout.runner import Rewarder
from vime.rollout.tasks import together
from vime.types import Sample

__all__ = ["Taught", "Unrewarded"]


class Unrewarded:
    """Implements ``Rewarder`` for runs that learn from the teacher alone: every reward is 0."""

    by_group = False

    async def reward(self, sample: Sample, *, evaluation: bool = False) -> None:
        if sample.reward is None and sample.ended_well:
            sample.reward = 0.0

    async def reward_group(self, samples: list[Sample], *, evaluation: bool = False) -> None:
        for sample in samples:
            await self.reward(sample, evaluation=evaluation)


class Taught:
    """Implements ``Rewarder``: what another one does, and ``teacher_log_probs`` on what is trained.

    A teacher that does not answer is an error of the sample's Grade: the sample is counted, shown and not trained.
    """

    def __init__(self, rewarder: Rewarder, teacher: Teacher, failures: type[Exception]) -> None:
        self._rewarder = rewarder
        self._teacher = teacher
        self._failures = failures

    @property
    def by_group(self) -> bool:
        return self._rewarder.by_group

    async def reward(self, sample: Sample, *, evaluation: bool = False) -> None:
        await self._rewarder.reward(sample, evaluation=evaluation)
        if not evaluation:
            await self._teach(sample)

    async def reward_group(self, samples: list[Sample], *, evaluation: bool = False) -> None:
        await self._rewarder.reward_group(samples, evaluation=evaluation)
        if not evaluation:
            await together(self._teach(sample) for sample in samples)

    async def _teach(self, sample: Sample) -> None:
        if sample.teacher_log_probs is not None or not sample.ended_well or not sample.response_length:
            return
        try:
            sample.teacher_log_probs = await self._teacher.log_probs(sample.tokens, sample.response_length)
        except self._failures as error:
            set_error(sample, f"--opd-teacher-url: {error}")
