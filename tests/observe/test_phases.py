"""Where the time goes, on a clock that the test moves."""

import pytest

from vime.observe.phases import PhaseTimer


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def spend(clock, timer, **phases):
    for name, seconds in phases.items():
        with timer.phase(name):
            clock.now += seconds


def test_seconds_by_phase_and_overhead(clock):
    timer = PhaseTimer(clock)
    spend(clock, timer, generate=4, train=3, sync=1)
    clock.now += 2
    times = timer.lap()
    assert times.seconds == {"generate": 4, "train": 3, "sync": 1}
    assert times.step == 10
    assert times.overhead_share == pytest.approx(0.2)


def test_saving_is_overhead_and_evaluation_belongs_to_no_step(clock):
    timer = PhaseTimer(clock)
    spend(clock, timer, generate=6, save=2, evaluate=50)
    times = timer.lap()
    assert times.step == 8
    assert times.overhead_share == pytest.approx(0.25)
    assert times.seconds["evaluate"] == 50


def test_phases_that_overlap_count_once_as_work(clock):
    timer = PhaseTimer(clock)
    with timer.phase("generate"):
        clock.now += 1
        with timer.phase("train"):
            clock.now += 2
        clock.now += 1
    times = timer.lap()
    assert times.seconds == {"generate": 4, "train": 2}
    assert times.work == times.wall == 4
    assert times.overhead_share == 0


def test_a_phase_that_crosses_a_lap_counts_in_both_steps(clock):
    timer = PhaseTimer(clock)
    with timer.phase("generate"):
        clock.now += 3
        first = timer.lap()
        clock.now += 2
    assert first.seconds == {"generate": 3}
    assert timer.lap().seconds == {"generate": 2}
    assert timer.totals() == {"generate": 5}


def test_a_phase_ends_also_when_it_fails(clock):
    timer = PhaseTimer(clock)
    with pytest.raises(RuntimeError), timer.phase("train"):
        clock.now += 1
        raise RuntimeError
    clock.now += 1
    assert timer.lap().seconds == {"train": 1}


def test_an_empty_step_has_no_overhead(clock):
    assert PhaseTimer(clock).lap().overhead_share == 0


def test_metrics_of_a_step(clock):
    timer = PhaseTimer(clock)
    spend(clock, timer, generate=3)
    clock.now += 1
    assert timer.lap().metrics() == {
        "perf/step_time": 4,
        "perf/overhead_share": 0.25,
        "perf/phase_time/generate": 3,
    }
