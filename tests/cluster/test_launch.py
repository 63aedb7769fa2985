"""How a run ends that a person interrupts."""

import asyncio
import signal
import subprocess
import sys

import pytest

from vime.cluster.launch import one_interrupt_is_enough, tells_that_it_stops


@pytest.fixture(autouse=True)
def handler():
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, asyncio.CancelledError])
def test_after_an_interrupt_further_ones_do_nothing(kind):
    with pytest.raises(kind), one_interrupt_is_enough():
        raise kind
    signal.raise_signal(signal.SIGINT)


def test_a_run_that_is_not_interrupted_can_still_be():
    with one_interrupt_is_enough():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_that_the_end_has_begun_is_told_of_interrupts_alone():
    said = []
    with pytest.raises(asyncio.CancelledError), tells_that_it_stops(said.append):
        raise asyncio.CancelledError
    with pytest.raises(ValueError), tells_that_it_stops(said.append):
        raise ValueError
    assert said == ["interrupted: stopping every process"]


PROGRAM = """
import asyncio, sys
from vime.cluster import launch

async def exits():
    sys.exit(0)

async def run(config):
    task = asyncio.create_task(exits())  # by a reward, say, that does not wait for it
    await asyncio.sleep(9)

launch.run = run
sys.exit(launch.main(None))
"""


def test_a_task_of_a_user_that_exits_ends_the_run_with_a_cause_and_not_with_status_0() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], timeout=120, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "error: a task of a custom function raised SystemExit: 0 (<string>:6), which ended the run" in done.stderr
