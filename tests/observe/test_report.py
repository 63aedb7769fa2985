"""The loop's report: display, record and accounts of time from one call."""

import io
import json

import pytest
from rich.console import Console

from vime.observe.metrics import describe
from vime.observe.progress import Progress
from vime.observe.recorder import RunRecorder
from vime.observe.report import RunReport
from vime.types import RolloutBatch, TrainResult


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Run:
    """A report with everything behind it."""

    def __init__(self, directory, **resumed):
        self.clock, self.console = Clock(), Console(file=io.StringIO(), width=120)
        self.recorder = RunRecorder(directory)
        progress = Progress(10, clock=self.clock, console=self.console)
        self.report = RunReport(self.recorder, progress, clock=self.clock, **resumed)

    def rollout(self, rollout_id, steps=1):
        for phase, seconds in (("generate", 4), ("train", 3), ("sync", 1)):
            with self.report.phase(phase):
                self.clock.now += seconds
        self.clock.now += 2
        batch = RolloutBatch(rollout_id=rollout_id, samples=(), metrics={"rollout/raw_reward": 0.5})
        self.report.trained(batch, TrainResult(steps=tuple({"train/loss": float(i)} for i in range(steps))))

    def rows(self):
        return [json.loads(line) for line in self.recorder.metrics_path.read_text().splitlines()]

    def lines(self):
        return [line.rstrip() for line in self.console.file.getvalue().splitlines()]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_each_optimizer_step_has_a_row_and_the_last_one_speaks_for_the_rollout(run):
    run.rollout(0, steps=2)
    first, last = run.rows()
    assert first == {"rollout_id": 0, "step": 1, "train/loss": 0.0}
    assert (last["rollout_id"], last["step"], last["train/loss"]) == (0, 2, 1.0)
    assert last["rollout/raw_reward"] == 0.5
    assert last["perf/step_time"] == 10
    assert last["perf/update_weights_time"] == 1
    assert last["perf/overhead_share"] == pytest.approx(0.2)


def test_starting_up_is_no_part_of_the_first_step(run):
    with run.report.phase("start"):
        run.clock.now += 100
    run.rollout(0)
    assert run.rows()[0]["perf/step_time"] == 10


def test_every_name_in_a_row_is_registered(run):
    run.rollout(0)
    names = run.rows()[0].keys() - {"rollout_id", "step"}
    assert [name for name in names if describe(name) is None] == []


def test_a_resumed_run_goes_on_counting_steps(tmp_path):
    run = Run(tmp_path, steps=7)
    run.rollout(7)
    assert run.rows()[0]["step"] == 8


def test_rollouts_and_steps_of_a_resumed_run_are_counted_alike(tmp_path):
    run = Run(tmp_path, rollouts=2, steps=4)
    run.rollout(2, steps=2)
    run.report.finish(peak_memory_bytes=None, resume_command=None)
    facts = [" ".join(line.split()) for line in run.lines()]
    assert "Rollouts 3, 1 of them since it was resumed" in facts
    assert "Optimizer steps 6, 2 of them since it was resumed" in facts


def test_an_evaluation_is_told_of_the_rollout_that_it_follows(run):
    run.report.evaluated(24, {"eval/math": 0.25})
    assert run.lines() == ["evaluation after rollout 24: math 0.250"]


def test_an_evaluation_is_recorded_and_told(run):
    run.report.evaluated(0, {"eval/math": 0.25, "eval/math-errors": 0.0, "eval/math-greedy": 0.5})
    assert run.rows()[0]["eval/math"] == 0.25
    assert run.lines() == ["evaluation before rollout 1: math 0.250  math-greedy 0.500"]


def test_the_final_table_compares_the_first_evaluation_with_the_last(tmp_path):
    run = Run(tmp_path, first_evals={"eval/math": 0.125})
    for rollout_id, reward in ((5, 0.25), (6, 0.625)):
        run.report.evaluated(rollout_id, {"eval/math": reward})
    run.rollout(6)
    run.report.finish(peak_memory_bytes=2**30, resume_command="python train.py")
    row = next(line for line in run.lines() if "math" in line and "│" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["math", "0.125", "0.625", "+0.500"]
    assert "Continue: python train.py" in run.lines()


def test_what_is_noted_is_written_once_with_the_rollout_that_is_being_made(run):
    run.report.note({"memory/engine/generate": 2.0})
    run.report.note({"memory/engine/train": 1.0})
    run.rollout(0, steps=2)
    run.rollout(1)
    first, second, third = run.rows()
    assert second["memory/engine/generate"] == 2.0 and second["memory/engine/train"] == 1.0
    assert not [name for row in (first, third) for name in row if name.startswith("memory/")]
    assert describe("memory/engine/train").unit == "GiB"
