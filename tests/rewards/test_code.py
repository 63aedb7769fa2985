"""The grader ``code``: real programs in the real sandbox."""

import json
import time

import pytest

from vime.rewards import GraderProcessPool, code, registry
from vime.rewards.code import DEADLINE_VARIABLE, SANDBOX_VARIABLE, SCORE_VARIABLE, check_sandbox, grade, last_block
from vime.sandbox import Outcome, Result, SandboxError
from vime.types import GradeStatus

ADD = "def add(a, b):\n    return a + b"
SUM = "print(sum(map(int, input().split())))"
PAIRS = {"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]}
CHECKS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]


def answer(program):
    return f"Some words.\n\n```python\n{program}\n```\nDone."


def graded(program, tests, **metadata):
    return grade(answer(program), None, {"tests": tests, **metadata})


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (SUM, PAIRS),
        (SUM, [{"input": "1 2", "output": "3"}]),
        (SUM, json.dumps(PAIRS)),
        (ADD, CHECKS),
        (ADD, "assert add(1, 2) == 3\nfor i in range(9):\n    assert add(i, i) == 2 * i"),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: 'int'\ndef _f(): return P(1)",
            ["assert _f().x == 1"],
        ),
    ],
)
def test_a_program_that_passes_all_its_tests_scores_1(program, tests):
    grade = graded(program, tests)
    assert (grade.score, grade.status) == (1.0, GradeStatus.SCORED), grade.detail


def test_tests_may_stand_in_the_label():
    assert grade(answer(SUM), json.dumps(PAIRS), {}).score == 1.0
    assert grade(answer(ADD), "assert add(1, 2) == 3", {}).score == 1.0


@pytest.mark.parametrize(
    ("program", "tests", "detail"),
    [
        ("print(3)", PAIRS, "1 of 2 passed; wrong output"),
        ("print(", PAIRS, "0 of 2 passed; SyntaxError: '(' was never closed"),
        ("def add(a, b):\n    return a - b", CHECKS, "0 of 1 passed; AssertionError"),
        (SUM + "\nraise SystemExit(1)", PAIRS, "0 of 2 passed; exit code 1"),
        ("import sys\nsys.exit(0)", CHECKS, "0 of 1 passed; it ended before the check did"),
        ("import os\nos._exit(0)", CHECKS, "0 of 1 passed; it ended before the check did"),
        ("x = 'x' * (600 << 20)", PAIRS, "0 of 2 passed; MemoryError"),
    ],
)
def test_a_program_that_fails_scores_0_and_says_why(program, tests, detail):
    grade = graded(program, tests)
    assert (grade.score, grade.status, grade.detail) == (0.0, GradeStatus.SCORED, detail)


def test_the_fraction_of_passed_tests_may_be_the_score(monkeypatch):
    assert graded("print(3)", PAIRS, code_score="fraction").score == 0.5
    monkeypatch.setenv(SCORE_VARIABLE, "fraction")
    assert graded("def add(a, b):\n    return 3", CHECKS).score == 0.5
    assert graded("def add(a, b):\n    return 3", CHECKS, code_score="all").score == 0.0


def test_a_program_that_hangs_fails_within_its_time_and_so_do_the_tests_that_are_left():
    tests = {"inputs": ["1 2"] * 50, "outputs": ["3"] * 50}
    start = time.monotonic()
    grade = graded("while True: pass", tests, time_limit_s=0.5)
    assert (grade.score, grade.detail) == (0.0, "0 of 50 passed; timeout")
    assert time.monotonic() - start < 15


def test_with_fractions_a_program_that_hangs_fails_what_the_deadline_leaves_undone(monkeypatch):
    monkeypatch.setenv(DEADLINE_VARIABLE, "12")
    tests = {"inputs": ["1 2"] + ["9 9"] * 50, "outputs": ["3"] + ["18"] * 50}
    hangs_later = "a, b = map(int, input().split())\nwhile a == 9: pass\nprint(a + b)"
    start = time.monotonic()
    grade = graded(hangs_later, tests, time_limit_s=1, code_score="fraction")
    assert grade.score == pytest.approx(1 / 51)
    assert time.monotonic() - start < 30  # 50 tests of a second, were they all run


def test_more_tests_than_the_deadline_allows_are_an_error_not_a_0(monkeypatch):
    monkeypatch.setenv(DEADLINE_VARIABLE, "3")
    tests = {"inputs": ["1 2"] * 1000, "outputs": ["3"] * 1000}
    grade = graded(SUM, tests, time_limit_s=1.0)
    assert grade.status is GradeStatus.ERROR
    assert "of 1000 tests fit into the deadline of 3 s (--rm-timeout-s)" in grade.detail


def test_a_test_that_the_deadline_gives_less_time_than_it_has_is_an_error_where_the_program_needs_it(monkeypatch):
    """It has 3 s by the clock, for 1 s of processor time, and only 85 % of the deadline is there for tests."""
    monkeypatch.setenv(DEADLINE_VARIABLE, "3")
    grade = graded(SUM + "\nimport time; time.sleep(2.8)", {"inputs": ["1 2"], "outputs": ["3"]}, time_limit_s=1.0)
    assert grade.status is GradeStatus.ERROR
    assert "only 0 of 1 tests fit into the deadline of 3 s" in grade.detail


class Hangs:
    """Stands in for a sandbox whose programs use up one limit after the other."""

    def __init__(self, *limits):
        self.limits = iter(limits)

    async def run(self, files, command, stdin, limits):
        return Result(stdout="", stderr="", status=Outcome.TIMEOUT, seconds=getattr(limits, next(self.limits)))


@pytest.mark.parametrize(
    ("used_up", "status", "detail"),
    [
        (["cpu_s"], GradeStatus.SCORED, "0 of 1 passed; timeout"),
        (["cpu_s", "wall_s", "wall_s"], GradeStatus.SCORED, "0 of 3 passed; timeout"),
        (["wall_s", "cpu_s"], GradeStatus.ERROR, "only 0 of 2 tests fit"),
    ],
)
def test_a_program_that_hung_has_failed_what_the_deadline_leaves_no_time_for(monkeypatch, used_up, status, detail):
    """Of 3 s by the clock, which a test has for 1 s of processor time, the deadline leaves less to each."""
    monkeypatch.setenv(DEADLINE_VARIABLE, "3")
    monkeypatch.setattr(code, "_sandbox", lambda *_, **__: Hangs(*used_up))
    tests = {"inputs": ["1"] * len(used_up), "outputs": ["1"] * len(used_up)}
    grade = graded(SUM, tests, time_limit_s=1, code_score="fraction")
    assert (grade.score or 0.0, grade.status) == (0.0, status)
    assert detail in grade.detail


@pytest.mark.parametrize("end", ["\n```", "\n  ```  ", "\n```\n", "\n```<|im_end|>", "\n```</s>\n"])
def test_the_last_block_counts(end):
    assert last_block(f"```\nfirst\n```\ntext\n```py\nlast{end}") == "last\n"


@pytest.mark.parametrize("response", ["no code", "`inline`", "```python\nprint(1)", "```\na\n```\n```python\nprint(1)"])
def test_without_a_finished_last_block_there_is_no_answer(response):
    grade_ = grade(response, None, {"tests": PAIRS})
    assert (grade_.score, grade_.status) == (0.0, GradeStatus.INVALID)


def test_a_hundred_thousand_fences_are_read_in_no_time():
    start = time.monotonic()
    assert last_block("```x\n" * 100_000) is None
    assert last_block("```x\n" * 100_000 + "```") == "```x\n" * 99_999
    assert time.monotonic() - start < 2


def test_in_a_dialogue_the_last_turn_counts_before_what_others_said():
    dialogue = f"{answer(SUM)}\nuser\nLook at:\n```\nprint(0)\n```\nassistant\n"
    last = {"tests": PAIRS, "multi_turn": {"answer": answer(SUM)}}
    assert grade(dialogue + answer(SUM), None, last).score == 1.0
    assert grade(dialogue, None, last).score == 1.0
    done = {"tests": PAIRS, "multi_turn": {"answer": "It is done."}}
    assert grade(answer(SUM) + "<|im_end|>\nuser\nIt passes.\nassistant\nIt is done.", None, done).score == 1.0


@pytest.mark.parametrize("column", [True, "yes", {"answer": 3}])
def test_a_column_of_that_name_is_no_dialogue(column):
    assert grade(answer(SUM), None, {"tests": PAIRS, "multi_turn": column}).score == 1.0


def test_a_draft_in_the_reasoning_is_no_answer():
    assert grade(f"<think>{answer(SUM)}</think>I cannot.", None, {"tests": PAIRS}).status is GradeStatus.INVALID


@pytest.mark.parametrize(
    ("label", "metadata", "message"),
    [
        (None, {}, "there are no tests"),
        ("", {}, "there are no tests"),
        (None, {"tests": {"inputs": ["1"], "outputs": []}}, "1 inputs and 0 outputs"),
        (None, {"tests": {"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}}, "an object with the lists inputs and"),
        (None, {"tests": [{"in": "1"}]}, "a test is code or an object"),
        (None, {"tests": 3}, "tests are a list"),
        (None, {"tests": {"inputs": [1], "outputs": ["1"]}}, "are texts, not 1"),
        (None, {"tests": PAIRS, "time_limit_s": -1}, "time_limit_s is a positive number"),
        (None, {"tests": PAIRS, "code_score": "half"}, "code_score is one of all, fraction"),
        (None, {"tests": ["assert f()"], "test_setup": 1}, "test_setup is code"),
    ],
)
def test_tests_that_cannot_be_read_are_an_error(label, metadata, message):
    grade_ = grade(answer(SUM), label, metadata)
    assert grade_.status is GradeStatus.ERROR
    assert message in grade_.detail


def test_a_sandbox_that_fails_is_an_error(monkeypatch):
    monkeypatch.setenv(SANDBOX_VARIABLE, "http://127.0.0.1:9")
    monkeypatch.setenv(DEADLINE_VARIABLE, "2")
    grade_ = graded(SUM, PAIRS, time_limit_s=0.1)
    assert grade_.status is GradeStatus.ERROR
    assert "127.0.0.1:9" in grade_.detail


async def test_the_sandbox_is_tried_before_a_run_starts():
    await check_sandbox("auto")
    with pytest.raises(SandboxError, match="--rm-code-sandbox: isolation is auto, namespaces"):
        await check_sandbox("docker")


async def test_it_runs_in_the_grader_pool_with_the_settings_of_the_run():
    pool = GraderProcessPool(2, 10.0, preload=["code"], environment={SCORE_VARIABLE: "fraction"})
    try:
        grade_ = await pool.grade("code", answer("print(3)"), None, {"tests": PAIRS})
        hung = await pool.grade("code", answer("while True: pass"), None, {"tests": PAIRS, "time_limit_s": 0.3})
        counts = pool.counts()
    finally:
        await pool.close()
    assert (grade_.score, grade_.extra) == (0.5, {"passed": 0.5})
    assert hung.score == 0.0
    assert counts["error"] == counts["died"] == 0


def test_a_row_without_a_label_can_be_graded():
    assert not registry.needs_label("code")
    assert registry.is_local("code")


def test_a_block_within_a_list_is_indented_as_its_fence_is():
    answer = "1. The program:\n\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n"
    assert last_block(answer) == "def add(a, b):\n    return a + b\n"


def test_a_program_that_reads_standard_input_finds_nothing_there_and_does_not_spoil_its_check():
    program = "import sys\ndata = sys.stdin.read()\ndef empty():\n    return data == ''\n"
    assert graded(program, ["assert empty()"]).score == 1.0
    assert graded("import os, sys\nprint(sys.stdin.read())\nos._exit(0)\n", ["assert False"]).score == 0.0


def test_each_of_several_checks_that_run_as_one_has_its_time(monkeypatch):
    slow = "import time\ndef work():\n    end = time.process_time() + 0.3\n    while time.process_time() < end: pass\n"
    grade = graded(slow, ["work()"] * 4, time_limit_s=0.5)
    assert grade.score == 1.0, grade.detail
