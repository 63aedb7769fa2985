"""What each ``--rm-type`` gives for a response."""

import pytest

from vime.errors import UserError
from vime.rewards import registry
from vime.types import GradeStatus


def score(rm_type, response, label="34"):
    return registry.load(rm_type)(response, label, {}).score


def status(rm_type, response, label="34"):
    return registry.load(rm_type)(response, label, {}).status


def test_math_wants_a_box():
    assert score("math", r"so \boxed{34}") == 1.0
    assert score("math", r"so \boxed{35}") == 0.0
    assert score("math", "so 34") == 0.0
    assert status("math", "so 34") is GradeStatus.INVALID


def test_math_without_a_label_is_an_error_and_no_zero():
    assert status("math", r"\boxed{34}", None) is GradeStatus.ERROR


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"<think>\boxed{35}</think> \boxed{34}", 1.0),
        (r"<think>\boxed{34}</think> no box", 0.0),
        (r"\boxed{34}", 1.0),
        (r"###Response \boxed{1} ###Response \boxed{34}", 1.0),
    ],
)
def test_deepscaler_grades_what_follows_the_thinking_or_everything(response, expected):
    assert score("deepscaler", response) == expected


@pytest.mark.parametrize(
    "answer", ["**Answer:** 34", "Answer: 34.0", "Answer: 34.", r"Answer: \boxed{34}", "Answer: $34$"]
)
def test_dapo_gives_one_for_the_right_answer_line(answer):
    grade = registry.load("dapo")("thinking …\n" + answer, "34", {})
    assert grade.score == 1.0
    assert grade.extra["acc"] is True


def test_dapo_gives_minus_one_and_the_prediction():
    grade = registry.load("dapo")("Answer: 35", "34", {})
    assert (grade.score, grade.extra) == (-1.0, {"acc": False, "pred": "35"})


def test_dapo_looks_at_the_last_300_characters_only():
    grade = registry.load("dapo")("Answer: 34" + " " * 300, "34", {})
    assert (grade.score, grade.status) == (-1.0, GradeStatus.INVALID)


@pytest.mark.parametrize(
    ("label", "expected"), [(r"\frac12", 1.0), ("0.5", 1.0), ("x^2", -1.0), ("east", -1.0), ("{[(", -1.0)]
)
def test_dapo_takes_labels_of_any_kind(label, expected):
    assert score("dapo", "Answer: 1/2", label) == expected


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("it is 34.", "34"),
        ("34.0", "34"),
        ("1,000 apples", "1000"),
        (r"1\,000", "1000"),
        ("1000", "1,000"),
        ("so x = -3", "-3"),
        ("5-3", "3"),
        ("3/4", "0.75"),
        (".5", "1/2"),
        ("$1,234,567.50", "1234567.5"),
        ("9007199254740993", "9007199254740993"),
        ("12 of 34", "34"),
        ("50%", "50"),
        ("1, 2", "2"),
        ("72", "#### 72"),
    ],
)
def test_last_number_is_right(response, label):
    assert score("last_number", response, label) == 1.0


@pytest.mark.parametrize(
    ("response", "label"),
    [("34 or 35", "34"), ("3", "-3"), ("0.333", "1/3"), ("9007199254740993", "9007199254740992"), ("1,2", "12")],
)
def test_last_number_is_wrong(response, label):
    assert score("last_number", response, label) == 0.0


def test_last_number_needs_a_number_in_response_and_label():
    assert status("last_number", "none") is GradeStatus.INVALID
    assert status("last_number", "34", "none") is GradeStatus.ERROR


@pytest.mark.parametrize("rm_type", ["boxed_math", "boxed_deepscaler", "boxed_dapo", "boxed_last_number"])
def test_the_prefix_boxed_takes_the_last_box_once(rm_type):
    assert score(rm_type, r"\boxed{1} \boxed{34}") == 1.0
    assert status(rm_type, "no box: 34") is GradeStatus.INVALID


def test_an_unknown_grader_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="did you mean 'deepscaler'"):
        registry.check("deepscale")
    with pytest.raises(UserError, match="no grader 'boxed_'"):
        registry.check("boxed_")


def test_rule_rewards_need_a_label_and_a_service_does_not():
    assert registry.needs_label("boxed_math")
    assert not registry.needs_label("remote_rm")
