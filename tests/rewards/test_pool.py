"""The pool: whatever a grader does, every answer gets a Grade in time, and nothing is left behind."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.processes import children_with
from vime.rewards import GraderProcessPool
from vime.types import GradeStatus


@contextlib.asynccontextmanager
async def running(workers=1, deadline_s=1.0, module="tests.rewards.bad_worker", **options):
    pool = GraderProcessPool(workers, deadline_s, worker_module=module, **options)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


def grader_processes():
    return children_with("rewards")


@pytest.mark.parametrize("how", ["hang", "spin"])
async def test_a_grader_that_never_ends_is_an_error_after_its_deadline_and_the_next_answer_is_graded(how):
    async with running() as pool:
        stuck, after = await asyncio.gather(pool.grade("x", how, "1", {}), pool.grade("x", "", "2", {}))
        assert (stuck.status, stuck.detail) == (GradeStatus.ERROR, "deadline of 1 s exceeded")
        assert after.score == 2.0
        assert pool.counts() == {"scored": 1, "invalid": 0, "error": 1, "deadline_exceeded": 1, "died": 0}


async def test_nobody_waits_for_a_grader_that_hangs_in_another_process():
    async with running(workers=2, deadline_s=30.0) as pool:
        stuck = asyncio.create_task(pool.grade("x", "hang", "1", {}))
        await asyncio.sleep(0)
        grades = await asyncio.gather(*(pool.grade("x", "", str(i), {}) for i in range(20)))
        assert [grade.score for grade in grades] == list(range(20))
        assert not stuck.done()
        stuck.cancel()


async def test_a_process_that_ends_by_itself_is_an_error_and_replaced():
    async with running(deadline_s=30.0) as pool:
        crashed, after = await asyncio.gather(pool.grade("x", "crash", "1", {}), pool.grade("x", "", "2", {}))
        assert crashed.detail == "the grader process ended with exit status 3"
        assert after.score == 2.0
        assert pool.counts()["died"] == 1


async def test_a_program_that_a_grader_leaves_behind_is_not_waited_for(tmp_path):
    """It has the pipes of the grader, so that they are not closed when that ends."""
    file = tmp_path / "pid"
    async with asyncio.timeout(20), running(deadline_s=30.0) as pool:
        try:
            left = await pool.grade("x", "leave", str(file), {})
            assert left.detail == "the grader process ended with exit status 3"
            assert (await pool.grade("x", "", "2", {})).score == 2.0
        finally:
            os.kill(int(file.read_text()), signal.SIGKILL)


async def test_an_idle_process_that_was_killed_is_replaced_before_the_next_grading():
    async with running(deadline_s=30.0) as pool:
        pid = int((await pool.grade("x", "pid", "", {})).score)
        os.kill(pid, signal.SIGKILL)
        assert (await pool.grade("x", "", "5", {})).score == 5.0


async def test_an_answer_whose_grader_is_killed_half_way_is_graded_by_another_process():
    async with running(deadline_s=30.0) as pool:
        grading = asyncio.create_task(pool.grade("x", "later", "7", {}))
        await asyncio.sleep(0.5)
        (victim,) = grader_processes()
        victim.kill()
        assert (await grading).score == 7.0
        assert pool.counts() == {"scored": 1, "invalid": 0, "error": 0, "deadline_exceeded": 0, "died": 0}


async def test_an_answer_that_is_killed_twice_is_an_error():
    async with running(deadline_s=30.0) as pool:
        grade = await pool.grade("x", "killed", "7", {})
        assert grade.detail == "the grader process ended by signal 9"
        assert pool.counts()["died"] == 1
        assert (await pool.grade("x", "", "2", {})).score == 2.0


async def test_memory_is_limited_and_the_process_goes_on():
    async with running(deadline_s=30.0) as pool:
        assert (await pool.grade("x", "bomb", "1", {})).detail == "the memory limit was reached"
        assert (await pool.grade("x", "", "2", {})).score == 2.0


async def test_an_exception_is_an_error_with_its_message():
    async with running(deadline_s=30.0) as pool:
        assert (await pool.grade("x", "raise", "1", {})).detail == "x raised ZeroDivisionError: by nought"


async def test_what_a_grader_prints_does_not_disturb():
    async with running(deadline_s=30.0) as pool:
        assert (await pool.grade("x", "print", "1", {})).score == 1.0


async def test_two_hundred_gradings_at_once_come_back_in_order():
    async with running(workers=2, deadline_s=30.0, module="vime.rewards.worker") as pool:
        grades = await asyncio.gather(
            *(pool.grade("last_number", f"it is {i}", str(i if i % 3 else -1), {}) for i in range(200))
        )
        assert [grade.score for grade in grades] == [float(i % 3 != 0) for i in range(200)]


@pytest.mark.parametrize("answer", ["9**9**9**9", "9^{9^{9^9}}", "(x+1)**5000", "2**(10**9)"])
async def test_answers_that_would_take_for_ever_are_errors_and_no_zeros(answer):
    async with running(workers=2, deadline_s=1.0, module="vime.rewards.worker", preload=["math"]) as pool:
        asked = [(rf"\boxed{{{answer}}}", "34"), (r"\boxed{34}", answer)]
        grades = await asyncio.gather(*(pool.grade("math", response, label, {}) for response, label in asked))
        assert [grade.status for grade in grades] == [GradeStatus.ERROR] * 2


async def test_a_cancelled_grading_frees_its_place():
    async with running(deadline_s=30.0) as pool:
        task = asyncio.create_task(pool.grade("x", "hang", "1", {}))
        await asyncio.sleep(0.2)
        task.cancel()
        assert (await pool.grade("x", "", "2", {})).score == 2.0


async def test_close_leaves_no_process_whatever_runs():
    pool = GraderProcessPool(2, 30.0, worker_module="tests.rewards.bad_worker")
    await pool.start()
    tasks = [asyncio.create_task(pool.grade("x", "hang", "1", {})) for _ in range(3)]
    await asyncio.sleep(0.2)
    assert len(grader_processes()) == 2
    await pool.close()
    assert grader_processes() == []
    assert {grade.status for grade in await asyncio.gather(*tasks)} == {GradeStatus.ERROR}
    assert (await pool.grade("x", "", "1", {})).detail == "the grader pool is closed"


async def test_close_while_processes_still_start():
    pool = GraderProcessPool(2, 30.0)
    task = asyncio.create_task(pool.grade("math", "", "1", {}))
    await asyncio.sleep(0.05)
    await pool.close()
    assert (await task).status is GradeStatus.ERROR
    assert grader_processes() == []


async def test_a_process_that_cannot_start_says_why():
    pool = GraderProcessPool(1, 1.0, worker_module="tests.rewards.no_such_module")
    grade = await pool.grade("x", "", "1", {})
    await pool.close()
    assert grade.detail.startswith("no grader process could be started: the grader process ended with exit status 1")
    assert "no_such_module" in grade.detail


PARENT = """
import asyncio
from tests.processes import children_with
from vime.rewards import GraderProcessPool
async def main():
    pool = GraderProcessPool(1, 600.0, worker_module="tests.rewards.bad_worker")
    print(int((await pool.grade("x", "pid", "", {})).score), flush=True)
    await pool.grade("x", "spin", "1", {})
asyncio.run(main())
"""


def test_processes_die_with_their_parent_even_while_they_grade():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    with contextlib.suppress(psutil.NoSuchProcess):
        child.wait(timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def circular():
    value = {}
    value["me"] = value
    return value


@pytest.mark.parametrize(
    ("metadata", "message"), [({(1, 2): 3}, "TypeError"), (circular(), "ValueError"), ({"n": 10**5000}, "ValueError")]
)
async def test_metadata_that_cannot_be_sent_is_an_error_and_the_process_goes_on(metadata, message):
    async with running(deadline_s=30.0) as pool:
        (before,) = grader_processes()
        unsent = await pool.grade("x", "", "1", metadata)
        assert unsent.detail.startswith(f"the sample cannot be sent to a grader: {message}")
        assert (await pool.grade("x", "", "2", {})).score == 2.0
        assert grader_processes() == [before]
