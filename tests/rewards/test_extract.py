"""Where the answer stands in a response."""

import pytest

from vime.rewards.extract import after_thinking, answer_line, last_boxed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("no box at all", None),
        (r"so \boxed{34}.", "34"),
        (r"\fbox{34}", "34"),
        (r"\boxed 34", "34"),
        (r"$\boxed 34$.", "34"),
        (r"it is \boxed 34.", "34"),
        (r"\boxed {34}", "34"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{1} then \fbox{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{a\\}", "a\\\\"),
        (r"\boxed{\boxed{34}}", "34"),
        (r"\boxed{}", ""),
        (r"set {a} and } then \boxed{5}", "5"),
        (r"\boxedanswer{5}", None),
        (r"\boxed{34", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed", None),
    ],
)
def test_the_last_closed_box_is_the_answer(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{34} \boxed{3", "34"),
        ("$\\boxed{34}$.\n\n$\\boxed{3", "34"),
        (r"\boxed{34} Wait, it must be \boxed{35", None),
        ("\\boxed{34} \\boxed{35 is wrong.\nLet me see", None),
    ],
)
def test_before_an_unclosed_box_the_closed_one_counts_only_where_nothing_was_said_between(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.timeout(20)
def test_a_hundred_thousand_unclosed_boxes_take_no_time():
    assert last_boxed(r"\boxed{" * 100_000) is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 34", "34"),
        ("**Answer:** 34", "34"),
        ("**Answer**: 34", "34"),
        ("Answer: **34**", "34"),
        ("Answer:\n34", "34"),
        ("Answer: 1\nNo.\nAnswer: 2\n", "2"),
        ("The answer: $34$", "$34$"),
        ("no line of that kind", None),
    ],
)
def test_the_answer_line_without_its_emphasis(text, answer):
    assert answer_line(text) == answer


def test_what_follows_the_thinking():
    assert after_thinking(r"<think>\boxed{1}</think>\boxed{2}") == r"\boxed{2}"
    assert after_thinking("a ###Response b ###Response c") == " c"
    assert after_thinking("never thought") == "never thought"
