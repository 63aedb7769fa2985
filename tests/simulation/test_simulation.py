"""Seeds that go well, seeds that replay, and mistakes that are found.

A failing line ends with the command that shows what happened.
"""

import asyncio
import dataclasses
import hashlib
import os
import subprocess
import sys

import pytest

from tests.simulation.bugs import BUGS
from tests.simulation.check import check
from tests.simulation.clock import Stopped, VirtualLoop
from tests.simulation.run import Driver, simulate
from tests.simulation.scenario import FEATURES, Faults, scenario_of

FEW, MANY = 100, 2000


def failing(seeds: range) -> list[str]:
    return [line for seed in seeds if (line := check(seed)) is not None]


def test_invariants_hold_in_a_hundred_worlds():
    assert failing(range(FEW)) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FEW, MANY, 100))
def test_invariants_hold_in_two_thousand_worlds(first: int):
    assert failing(range(first, first + 100)) == []


def test_the_hundred_worlds_have_everything_in_them():
    scenarios = [scenario_of(seed) for seed in range(FEW)]
    assert set(FEATURES) <= {feature for scenario in scenarios for feature in scenario.features}
    assert all(any(getattr(each.faults, fault.name) for each in scenarios) for fault in dataclasses.fields(Faults))


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_within_two_hundred_worlds(bug: type[Driver]):
    lines = (check(seed, bug) for seed in range(200))
    assert any(line is not None and bug.told_as in line for line in lines)


def digest(seeds: range) -> str:
    told = "\n".join(str(event) for seed in seeds for event in simulate(scenario_of(seed)).trace)
    return hashlib.sha256(told.encode()).hexdigest()


def test_a_seed_gives_the_same_trace_in_another_process_event_by_event():
    code = "from tests.simulation.test_simulation import digest; print(digest(range(20)))"
    environment = os.environ | {"PYTHONHASHSEED": "7"}  # texts have another hash there than here
    other = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == digest(range(20))


def test_the_command_replays_a_seed():
    command = [sys.executable, "-m", "tests.simulation", "3", "--trace"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert told[1:-1] == [str(event) for event in simulate(scenario_of(3)).trace]
    assert told[-1] == "seed 3: all is well"


def make_loop() -> VirtualLoop:
    return VirtualLoop(1, ends_after=1e6, most_steps=1000)


def test_an_hour_of_virtual_time_takes_none():
    loop = make_loop()
    loop.run_until_complete(asyncio.sleep(3600))
    assert loop.time() == 3600


async def spin() -> None:
    for _ in range(2000):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("wait", "why"),
    [
        (lambda: asyncio.get_running_loop().create_future(), "nothing is scheduled"),
        (lambda: asyncio.sleep(2e6), "after 1e\\+06 virtual seconds"),
        (spin, "after so many steps"),
    ],
    ids=["deadlock", "too late", "busy waiting"],
)
def test_a_run_that_does_not_end_is_stopped(wait, why):  # type: ignore[no-untyped-def]
    async def run() -> None:
        await wait()

    with pytest.raises(Stopped, match=why):
        make_loop().run_until_complete(run())
