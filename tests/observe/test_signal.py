"""What a person is told of rollouts that teach nothing."""

import pytest

from vime.observe.signal import SAY_AGAIN, SignalWatch
from vime.rewards import math
from vime.types import Grade, Sample, Status

ANSWER = "The sum of both numbers\nequals 42."


def answer(response=ANSWER, *, status=Status.COMPLETED):
    grade = math.grade(response, "42", {})
    return Sample(response=response, status=status, grade=grade, reward=grade.score)


def graded(*rewards):
    return [Sample(status=Status.COMPLETED, grade=Grade(score=reward), reward=reward) for reward in rewards]


class Watch:
    def __init__(self, **options):
        self.lines = []
        self.look = SignalWatch(Sample.score, say=self.lines.append, **options).look


def test_answers_without_a_box_are_told_in_the_graders_words_with_one_of_them():
    watch = Watch()
    watch.look(0, [[answer(), answer(status=Status.TRUNCATED)], [answer(), answer()]])
    assert watch.lines == [
        "warning: rollout 1: 4 of 4 answers cannot be graded: there is no answer in a \\boxed{} (cut at the "
        "length limit: 1); one begins: 'The sum of both numbers equals 42.'"
    ]


def test_nine_of_ten_are_nearly_all_and_eight_are_not():
    good = answer("\\boxed{42}")
    watch = Watch()
    watch.look(0, [[good, good, *[answer()] * 8]])
    assert watch.lines == []
    watch.look(1, [[good, *[answer()] * 9]])
    assert watch.lines[0].startswith("warning: rollout 2: 9 of 10 answers cannot be graded")


def test_the_same_is_told_again_only_after_some_rollouts():
    watch = Watch()
    for rollout_id in range(2 * SAY_AGAIN + 1):
        watch.look(rollout_id, [[answer()]])
    assert [line.split(":")[1].strip() for line in watch.lines] == ["rollout 1", "rollout 21", "rollout 41"]


def test_another_reason_is_told_at_once():
    watch = Watch()
    watch.look(0, [[answer(), answer()]])
    watch.look(1, [graded(0.0, 0.0), graded(1.0, 1.0), graded(0.0, 0.0)])
    assert watch.lines[1:] == [
        "warning: rollout 2: nothing to learn from it: in each of 3 groups all answers have the same reward "
        "(0 in 2, 1 in 1)"
    ]


@pytest.mark.parametrize("groups", [[graded(0.0, 0.0), graded(0.0, 1.0)], [graded(1.0)], [], [[Sample()]]])
def test_where_something_can_be_learnt_or_nothing_was_graded_nothing_is_told(groups):
    watch = Watch()
    watch.look(0, groups)
    assert watch.lines == []


def test_equal_rewards_teach_where_they_are_not_compared_within_a_group():
    watch = Watch(needs_spread=False)
    watch.look(0, [graded(1.0, 1.0)])
    assert watch.lines == []


def test_of_a_long_answer_only_the_beginning_is_shown():
    watch = Watch()
    watch.look(0, [[answer("x" * 500)]])
    assert watch.lines[0].endswith("one begins: '" + "x" * 80 + "…'")
