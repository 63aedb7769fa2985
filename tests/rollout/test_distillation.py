"""A teacher on a server is asked about what is trained, and about nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.rollout.fakes import FakeRewarder
from vime.rollout.conversion import to_rollout_batch
from vime.rollout.distillation import Taught, Unrewarded
from vime.types import GradeStatus, InvalidSample, Sample, Status


class FakeTeacher:
    """Says minus the token; fails on samples that hold a 9."""

    def __init__(self) -> None:
        self.asked = 0

    async def log_probs(self, token_ids: Sequence[int], response_length: int) -> list[float]:
        self.asked += 1
        if 9 in token_ids:
            raise OSError("the server is down")
        return [-float(token) for token in token_ids[-response_length:]]

    async def close(self) -> None: ...


def sample(index: int = 0, *tokens: int, status: Status = Status.COMPLETED) -> Sample:
    return Sample(index=index, group_index=0, tokens=[1, *tokens], response_length=len(tokens), status=status)


def same(samples: list[Sample]) -> tuple[list[float], list[float]]:
    rewards = [each.score() for each in samples]
    return rewards, rewards


async def test_a_sample_gets_the_log_probs_of_its_response_and_a_reward_of_0() -> None:
    taught = sample(0, 2, 3)
    await Taught(Unrewarded(), FakeTeacher(), OSError).reward(taught)
    assert (taught.reward, taught.teacher_log_probs) == (0.0, [-2.0, -3.0])
    (frozen,) = to_rollout_batch(0, [[taught]], same).samples
    assert frozen.scores.teacher_log_probs == (-2.0, -3.0)


async def test_rewards_of_a_grader_stay() -> None:
    graded = [sample(1, 2), sample(2, 3)]
    await Taught(FakeRewarder(by_group=True), FakeTeacher(), OSError).reward_group(graded)
    assert [each.reward for each in graded] == [1.0, 0.0]
    assert [each.teacher_log_probs for each in graded] == [[-2.0], [-3.0]]


async def test_nobody_is_asked_in_evaluations_nor_about_what_is_not_trained_or_judged_already() -> None:
    teacher = FakeTeacher()
    taught = Taught(Unrewarded(), teacher, OSError)
    await taught.reward(sample(0, 2), evaluation=True)
    await taught.reward(sample(0, 2, status=Status.ABORTED))
    await taught.reward(sample(0))
    judged = sample(0, 2)
    judged.teacher_log_probs = [-0.5]
    await taught.reward(judged)
    assert (teacher.asked, judged.teacher_log_probs) == (0, [-0.5])


async def test_a_teacher_that_fails_is_an_error_of_the_sample_which_keeps_its_place_untrained() -> None:
    good, bad = sample(0, 2, 3), sample(1, 9, 9)
    for each in (good, bad):
        await Taught(Unrewarded(), FakeTeacher(), OSError).reward(each)
    assert bad.grade is not None
    assert (bad.grade.status, bad.grade.detail) == (GradeStatus.ERROR, "--opd-teacher-url: the server is down")
    first, second = to_rollout_batch(0, [[good, bad]], same).samples
    assert first.trained_tokens == 2
    assert (second.loss_mask, second.scores.teacher_log_probs) == ((0, 0), (0.0, 0.0))


def test_log_probs_of_another_length_are_refused() -> None:
    wrong = sample(0, 2, 3)
    wrong.reward, wrong.teacher_log_probs = 0.0, [-1.0]
    with pytest.raises(InvalidSample, match="teacher_log_probs has 1 entries for 2 response tokens"):
        to_rollout_batch(0, [[wrong]], same)
