"""The run's files: complete rows, nothing doubled after a resume, trackers that may fail."""

import json
import math

import numpy as np
import pytest

from tests.disk import files_end_at
from vime.errors import UserError
from vime.observe.recorder import RunRecorder
from vime.types import Grade, Sample, Status


def rows(recorder):
    return [json.loads(line) for line in recorder.metrics_path.read_text().splitlines()]


class Memory:
    """A tracker that remembers, and fails when told to."""

    name = "memory"

    def __init__(self, fails=()):
        self.logged, self.resumed, self.closed, self.fails = [], None, False, fails

    def resume(self, step):
        self.resumed = step

    def log(self, metrics, *, rollout_id, step):
        if step in self.fails:
            raise ConnectionError("no route")
        self.logged.append((rollout_id, step, dict(metrics)))

    def close(self):
        self.closed = True


def test_a_row_holds_ids_and_metrics_and_is_on_disk_at_once(tmp_path):
    recorder = RunRecorder(tmp_path / "run")
    recorder.log({"train/loss": 0.5}, rollout_id=2, step=7)
    assert rows(recorder) == [{"rollout_id": 2, "step": 7, "train/loss": 0.5}]


def test_what_is_not_finite_is_named_and_never_written(tmp_path):
    memory = Memory()
    recorder = RunRecorder(tmp_path, trackers=[memory])
    recorder.log({"train/loss": math.nan, "train/lr": 1e-6}, rollout_id=0, step=0)
    assert rows(recorder) == [{"rollout_id": 0, "step": 0, "train/lr": 1e-6, "nonfinite": ["train/loss"]}]
    assert memory.logged == [(0, 0, {"train/lr": 1e-6})]


def test_a_resumed_run_cuts_off_what_came_after_its_checkpoint(tmp_path):
    first = RunRecorder(tmp_path)
    first.log({"train/loss": 1}, rollout_id=0, step=0)
    first.log({"train/loss": 2}, rollout_id=1, step=1)
    position = first.position()
    first.log({"train/loss": 3}, rollout_id=2, step=2)

    memory = Memory()
    second = RunRecorder(tmp_path, trackers=[memory])
    second.restore(position)
    second.log({"train/loss": 30}, rollout_id=2, step=2)
    assert [row["train/loss"] for row in rows(second)] == [1, 2, 30]
    assert memory.resumed == 2
    assert second.position() > position


def test_a_row_half_written_by_a_killed_run_goes_too(tmp_path):
    first = RunRecorder(tmp_path)
    first.log({"a": 1}, rollout_id=0, step=0)
    position = first.position()
    with first.metrics_path.open("a") as file:
        file.write('{"rollout_id": 1, "st')
    second = RunRecorder(tmp_path)
    second.restore(position)
    second.log({"a": 2}, rollout_id=1, step=1)
    assert [row["a"] for row in rows(second)] == [1, 2]


def test_resuming_into_another_folder_starts_its_file(tmp_path):
    recorder = RunRecorder(tmp_path)
    recorder.restore(5000)
    recorder.log({"a": 1}, rollout_id=9, step=9)
    assert [row["rollout_id"] for row in rows(recorder)] == [9]


def test_a_fresh_run_in_a_used_folder_keeps_the_old_rows_aside(tmp_path):
    for number in range(3):
        recorder = RunRecorder(tmp_path)
        recorder.log({"run": number}, rollout_id=0, step=0)
        recorder.close()
    assert [row["run"] for row in rows(recorder)] == [2]
    assert json.loads((tmp_path / "metrics.1.jsonl").read_text())["run"] == 0
    assert json.loads((tmp_path / "metrics.2.jsonl").read_text())["run"] == 1


def test_a_failing_tracker_is_reported_once_and_the_others_go_on(tmp_path):
    lines, broken, good = [], Memory(fails={0, 1}), Memory()
    recorder = RunRecorder(tmp_path, trackers=[broken, good], report=lines.append)
    for step in range(3):
        recorder.log({"a": step}, rollout_id=step, step=step)
    assert lines == ["memory failed: ConnectionError: no route; the run goes on without it"]
    assert len(good.logged) == len(rows(recorder)) == 3
    assert len(broken.logged) == 1
    recorder.close()
    assert lines[1:] == ["memory failed 2 times; metrics.jsonl is complete"] * 2  # both are called "memory"
    assert good.closed
    assert broken.closed


def test_samples_are_written_for_people_to_read(tmp_path):
    sample = Sample(
        group_index=3,
        index=13,
        prompt=[{"role": "user", "content": "3+4?"}],
        tokens=[1, 2, 3, 4],
        response="π = 7",
        response_length=2,
        label="7",
        reward=1.0,
        grade=Grade(score=1.0, detail="7"),
        status=Status.TRUNCATED,
        weight_versions=[5, 6],
        metadata={"level": np.int64(3), "scores": np.array([1.0, np.nan])},
    )
    RunRecorder(tmp_path).samples(12, [sample])
    text = (tmp_path / "samples" / "rollout_0000012.jsonl").read_text()
    assert "π" in text
    assert json.loads(text) == {
        "index": 13,
        "group_index": 3,
        "prompt": [{"role": "user", "content": "3+4?"}],
        "response": "π = 7",
        "label": "7",
        "reward": 1.0,
        "grade": {"status": "scored", "score": 1.0, "detail": "7"},
        "status": "truncated",
        "prompt_length": 2,
        "response_length": 2,
        "weight_versions": [5, 6],
        "removed": False,
        "metadata": {"level": 3, "scores": [1.0, "nan"]},
    }


def test_samples_of_a_rollout_that_runs_again_replace_the_old_ones(tmp_path):
    recorder = RunRecorder(tmp_path)
    recorder.samples(0, [Sample(), Sample()])
    recorder.samples(0, [Sample()])
    assert len((tmp_path / "samples" / "rollout_0000000.jsonl").read_text().splitlines()) == 1


def test_samples_of_an_evaluation_stand_apart(tmp_path):
    RunRecorder(tmp_path).samples(20, [Sample()], name="eval_aime/2024")
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["eval_aime_2024_0000020.jsonl"]


def test_odd_text_in_a_sample_does_no_harm(tmp_path):
    RunRecorder(tmp_path).samples(0, [Sample(response="\ud83d \u2028 \x00", reward={"score": math.inf, "who": object})])
    row = json.loads((tmp_path / "samples" / "rollout_0000000.jsonl").read_bytes())
    assert row["response"] == "\ud83d \u2028 \x00"
    assert row["reward"] == {"score": "inf", "who": "<class 'object'>"}


def test_the_resolved_configuration_is_kept(tmp_path):
    RunRecorder(tmp_path).write_config({"batch": {"global_batch_size": 8}, "path": tmp_path})
    assert json.loads((tmp_path / "run_config.json").read_text()) == {
        "batch": {"global_batch_size": 8},
        "path": str(tmp_path),
    }


def test_metrics_that_cannot_be_written_end_the_run_loudly(tmp_path):
    recorder = RunRecorder(tmp_path)
    recorder.metrics_path.mkdir()  # a folder where the file belongs
    with pytest.raises(UserError, match=r"metrics.jsonl: cannot be written: Is a directory$"):
        recorder.restore(0)


def test_a_full_disk_is_one_line_and_leaves_no_half_of_a_row(tmp_path):
    recorder = RunRecorder(tmp_path)
    recorder.log({"a": 1}, rollout_id=0, step=0)
    with (
        files_end_at(recorder.position() + 20),
        pytest.raises(UserError, match=rf"^{recorder.metrics_path}: cannot be written: File too large$"),
    ):
        recorder.log({"a": 2}, rollout_id=1, step=1)
    recorder.close()
    assert [row["a"] for row in rows(recorder)] == [1]


def test_samples_for_which_there_is_no_room_are_one_line_and_leave_nothing(tmp_path):
    with (
        files_end_at(100),
        pytest.raises(UserError, match=r"samples/rollout_0000003.jsonl: cannot be written: File too large$"),
    ):
        RunRecorder(tmp_path).samples(3, [Sample(response="long" * 100)])
    assert list((tmp_path / "samples").iterdir()) == []


def test_a_run_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/run: cannot be written: Not a directory$"):
        RunRecorder(tmp_path / "file" / "run")


@pytest.mark.parametrize("torn", [b'{"rollout_id": 1, "st', b'{"rollout_id": 1, "step": 1', b"\0\0\0", b"\0\0\n"])
def test_a_last_row_that_a_lost_machine_tore_is_dropped_with_a_warning(tmp_path, torn):
    first = RunRecorder(tmp_path)
    first.log({"a": 1}, rollout_id=0, step=0)
    with first.metrics_path.open("ab") as file:
        file.write(torn)
    lines, memory = [], Memory()
    second = RunRecorder(tmp_path, trackers=[memory], report=lines.append)
    second.restore(5000)
    assert lines == [
        f"warning: {second.metrics_path}: its last row, 2, was not written to its end and is dropped",
    ]
    assert memory.resumed == 1
    second.log({"a": 2}, rollout_id=1, step=1)
    assert [row["a"] for row in rows(second)] == [1, 2]


def test_a_row_that_lacks_only_its_end_of_line_is_kept_apart_from_the_next(tmp_path):
    first = RunRecorder(tmp_path)
    first.log({"a": 1}, rollout_id=0, step=0)
    first.metrics_path.write_bytes(first.metrics_path.read_bytes().rstrip())
    second = RunRecorder(tmp_path)
    second.restore(5000)
    second.log({"a": 2}, rollout_id=1, step=1)
    assert [row["a"] for row in rows(second)] == [1, 2]


def test_a_record_damaged_before_its_last_row_is_refused_by_the_row(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\nnonsense\nnonsense')
    with pytest.raises(UserError, match=r"metrics.jsonl: row 2 is damaged; remove what is wrong"):
        RunRecorder(tmp_path).restore(5000)


def test_samples_are_written_whatever_their_metadata_have_become(tmp_path):
    circular = {}
    circular["me"] = circular
    sample = Sample(index=0, metadata={"n": 10**5000, "circular": circular, "nan": math.nan, (1, 2): 3})
    RunRecorder(tmp_path).samples(0, [sample])
    (row,) = map(json.loads, (tmp_path / "samples" / "rollout_0000000.jsonl").read_text().splitlines())
    assert row["metadata"]["n"] == "an integer of 16610 bits"
    assert (row["metadata"]["nan"], row["metadata"]["(1, 2)"]) == ("nan", 3)
    assert json.dumps(row["metadata"]["circular"]).count("me") == 100


@pytest.mark.parametrize("name", ["step", "rollout_id", "nonfinite"])
def test_a_metric_cannot_take_the_place_of_what_a_row_has(tmp_path, name):
    with pytest.raises(UserError, match=f"a metric cannot be named {name}, as what every row of metrics.jsonl has"):
        RunRecorder(tmp_path).log({name: 3.0}, rollout_id=0, step=0)
