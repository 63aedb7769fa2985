"""What each ``--rm-type`` gives for a response."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.errors import UserError
from vime.rewards import registry
from vime.rewards.f1 import overlap as f1_overlap
from vime.rewards.f1 import words as f1_words
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
    "answer",
    [
        "ANSWER：34",
        "**Answer：** ３４",
        "**Answer:** 34",
        "Answer: 34.0",
        "Answer: 34.",
        r"Answer: \boxed{34}",
        "Answer: $34$",
    ],
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
        ("x = −5", "-5"),
        ("x = –5", "-5"),
        ("x = －5", "-5"),
        ("5−3", "3"),
        ("pages 3–5", "5"),
        ("it takes 2 1/2 hours", "2.5"),
        ("it takes 2½ hours", "5/2"),
        ("½", "0.5"),
        ("one of 7 3/2", "1.5"),
        ("３４", "34"),
        ("1，000", "1000"),
        ("1\u202f000", "1000"),
        ("1,\\!000", "1000"),
        ("1.5e3", "1500"),
        ("34 m²", "34"),
    ],
)
def test_last_number_is_right(response, label):
    assert score("last_number", response, label) == 1.0


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("x = −5", "5"),
        ("2 1/2", "1/2"),
        ("1 2", "12"),
        ("34 or 35", "34"),
        ("3", "-3"),
        ("0.333", "1/3"),
        ("9007199254740993", "9007199254740992"),
        ("1,2", "12"),
    ],
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


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("The Eiffel Tower", "eiffel tower", 1.0),
        ("It is the Eiffel tower.", "Eiffel Tower", 2 / 3),  # 2 of 4 words, both of the label: 2 · 1/2 · 1 / (3/2)
        ("Paris", "London", 0.0),
        ("paris paris", "paris", 2 / 3),  # a word counts as often as it is there
        ("", "paris", 0.0),
        ("the", "a", 0.0),
        ("A.", "A", 1.0),  # where an article is all there is, it counts
        ("", "The", 0.0),
        ("", "?!", 0.0),
        ("?!", "?!", 1.0),
        ("<think>London</think> Paris!", "paris", 1.0),
        ("yes, it is", "yes", 0.0),
        ("Yes.", "yes", 1.0),
        ("no", "yes", 0.0),
        ("“Paris”", "Paris", 1.0),
    ],
)
def test_f1_is_the_overlap_of_words(response, label, expected):
    assert score("f1", response, label) == pytest.approx(expected)


def test_f1_tells_its_parts_and_takes_the_best_of_several_answers():
    grade = registry.load("f1")("It is the Eiffel tower.", "Eiffel Tower", {"answers": ["a tower", "is Eiffel tower"]})
    assert grade.score == pytest.approx(6 / 7)  # it, is, eiffel, tower against is, eiffel, tower
    assert grade.extra == {"precision": 0.75, "recall": 1.0, "exact": 0.0}
    assert score("boxed_f1", r"I think it is \boxed{Paris}", "Paris") == 1.0
    assert status("f1", "x", None) is GradeStatus.ERROR
    wrong = registry.load("f1")("x", "y", {"answers": "z"})
    assert (wrong.status, wrong.detail) == (GradeStatus.ERROR, "metadata[\"answers\"] must be a list of texts, not 'z'")


@given(st.text(max_size=40), st.text(max_size=40))
def test_f1_is_a_share_that_does_not_depend_on_the_order_of_two_texts(one, other):
    f1, precision, recall, exact = f1_overlap(one, other)
    assert 0 <= f1 <= 1 and (f1, recall, precision, exact) == f1_overlap(other, one)
    if set(f1_words(one.upper())) - {"a", "an", "the"}:
        assert f1_overlap(one, f"The {one.upper()}!?")[0] == f1_overlap(one, one.upper())[0]
    assert f1_overlap(one, one) == (1.0, 1.0, 1.0, 1.0)


CHOOSES_C = [
    *(r"\boxed{C}", r"\boxed{\text{C}}", r"\boxed{(C)}", r"\boxed{C) Paris}", r"\fbox{C}", r"$\boxed{\mathbf{C}}$"),
    *("The answer is C.", "the answer is (C)", "**Answer:** C", "**Answer: C**", "Answer: c", "answer is c."),
    *("ANSWER: C", "Answer:\nC", "Answer: C) Paris", "Answer -> C", "Answer：C", r"The answer is \(C\)"),
    *("Final answer: **C**", "The correct answer is option C", "Correct option: C", "so the best choice is C"),
    *("Option C is correct.", "(C) is the correct answer", "I choose C", "the only one left is (C)"),
    *("C", "(C)", "C.", "**C**", "Therefore:\nC) Paris", "I rule out A and B.\n\nC"),
    "The answer is C because A is wrong",
    "Option A is incorrect. Option C is correct. Option D is too small.",
    "The answer is A. Wait, no: the answer is C",
    "<think>the answer is A</think>Answer: C",
    *("The answer is (C) and (A) is wrong", "The answer is C and B is wrong", "the answer is C, B isn't"),
    *("The answer is not A. It is C.", "The answer is not A but C.", "I'm confident that it's C.", "Therefore, C."),
    "The answer is C\nNote: option A is the best known.",
    "I think the answer is B. Wait, A is wrong. So final: C",
    "Hence (C).",
]


@pytest.mark.parametrize("response", CHOOSES_C)
def test_gpqa_finds_the_chosen_letter(response):
    grade = registry.load("gpqa")(response, "C", {})
    assert (grade.score, grade.detail, grade.status) == (1.0, "C", GradeStatus.SCORED)
    assert score("gpqa", response, "A") == 0.0


@pytest.mark.parametrize(
    "response",
    [
        *("The answer is A or C", "The answer is C and D", "(A) or (C)", "Answer: A, C", "Both (A) and (C) fit"),
        *("It is A good question", "So C and D remain"),
        *("I do not know", "Vitamin C is a vitamin", "The answer isn't C", "A C-rich diet", "", "Option C looks odd"),
        *("The answer is G", r"\boxed{}", r"\boxed{C or D}"),
    ],
)
def test_gpqa_takes_what_chooses_nothing_or_several_for_no_answer(response):
    grade = registry.load("gpqa")(response, "C", {})
    assert (grade.score, grade.status) == (0.0, GradeStatus.INVALID)


def test_gpqa_knows_the_choices_where_a_row_has_them():
    grade = registry.load("gpqa")
    cities = {"choices": ["Rome", "Paris", "New York", "York", "Oslo"]}
    assert grade("It must be Paris.", "B", cities).score == 1.0
    assert grade("Answer: E", "Oslo", cities).score == 1.0
    assert grade(r"\boxed{New York}", "C", cities).score == 1.0
    assert grade("Rome or Paris", "B", cities).status is GradeStatus.INVALID
    assert grade("Answer: G", "B", cities).status is GradeStatus.INVALID
    assert grade("Answer: B", "b", {"choices": {"A": "x", "B": "y"}}).score == 1.0
    assert grade("Answer: B", "Berlin", cities).detail == "the label 'Berlin' is no letter and none of the choices"
    assert grade("Answer: B", "Berlin", {}).detail == "the label 'Berlin' is no letter"
    assert grade("B", "B", {"choices": 5}).detail.startswith('metadata["choices"] must be a list of texts or a dict')


def test_gpqa_with_a_box_looks_nowhere_else():
    assert score("boxed_gpqa", r"Answer: A, so \boxed{C}", "C") == 1.0
    assert status("boxed_gpqa", "Answer: C", "C") is GradeStatus.INVALID
    assert score("gpqa", "Answer: H", "H") == 1.0, "the label says that there are so many"


TALK = [
    "Consider A.",
    "Option A is too large.",
    "B and D are close.",
    "(A) says so, (B) does not.",
    "A B C D",
    "I see.",
]
STATED = [
    "Answer: {}",
    "The answer is ({}).",
    r"\boxed{{{}}}",
    "The correct choice is {}",
    "Thus option {} is correct.",
]


@given(st.lists(st.sampled_from(TALK), max_size=6), st.sampled_from(STATED), st.sampled_from("ABCD"))
def test_gpqa_is_not_led_astray_by_what_is_discussed(talk, stated, letter):
    assert registry.load("gpqa")("\n".join([*talk, stated.format(letter)]), letter, {}).score == 1.0


@given(st.text(alphabet="ABCDabcd answeris:()\\boxed{}*_.\n=-|/", max_size=120), st.sampled_from("ABCD"))
def test_gpqa_never_fails(response, label):
    assert registry.load("gpqa")(response, label, {}).score in (0.0, 1.0)


def test_gpqa_is_quick_on_a_text_that_repeats_itself():
    start = time.perf_counter()
    for part in ("answer = ", "answer is ", "the correct ", "(A) ", "A, B, ", "   \n", "option A or "):
        registry.load("gpqa")(part * 20_000, "C", {})
    for blanks in (" ", "\n", " \n", "\t \n\n"):
        registry.load("gpqa")("The answer is" + blanks * 20_000 + ".", "C", {})
    assert time.perf_counter() - start < 10
