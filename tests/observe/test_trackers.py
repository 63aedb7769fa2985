"""TensorBoard and wandb, with the real packages."""

import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.disk import files_end_at
from vime.errors import UserError
from vime.observe import trackers
from vime.observe.trackers import TensorBoard, WandB, trackers_for


def curve(directory, tag):
    events = EventAccumulator(str(directory)).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_draws_over_optimizer_steps(tmp_path):
    board = TensorBoard(tmp_path)
    board.log({"train/loss": 0.5}, rollout_id=0, step=1)
    board.log({"train/loss": 0.25, "rollout/raw_reward": 1.0}, rollout_id=0, step=2)
    assert curve(tmp_path, "train/loss") == [(1, 0.5), (2, 0.25)]  # without close: each row is flushed
    board.close()
    assert curve(tmp_path, "rollout/raw_reward") == [(2, 1.0)]


def test_a_resumed_curve_has_no_doubled_points(tmp_path):
    first = TensorBoard(tmp_path)
    for step in range(4):
        first.log({"train/loss": float(step)}, rollout_id=step, step=step)
    first.close()
    second = TensorBoard(tmp_path)
    second.resume(2)
    second.log({"train/loss": 20.0}, rollout_id=2, step=2)
    second.close()
    assert curve(tmp_path, "train/loss") == [(0, 0.0), (1, 1.0), (2, 20.0)]


def test_a_full_disk_costs_only_the_points_for_which_there_was_no_room(tmp_path):
    board = TensorBoard(tmp_path)
    board.log({"train/loss": 0.5}, rollout_id=0, step=1)
    (file,) = tmp_path.iterdir()
    with files_end_at(file.stat().st_size + 20), pytest.raises(OSError, match="File too large"):
        board.log({"train/loss": 0.4}, rollout_id=0, step=2)
    board.log({"train/loss": 0.3}, rollout_id=0, step=3)
    board.close()
    assert curve(tmp_path, "train/loss") == [(1, 0.5), (3, pytest.approx(0.3))]


def test_a_folder_of_tensorboard_that_cannot_be_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/board: cannot be written: Not a directory$"):
        TensorBoard(tmp_path / "file" / "board")


def test_tensorboard_needs_neither_torch_nor_tensorflow(tmp_path):
    code = (
        "import sys; from vime.observe.trackers import TensorBoard; TensorBoard(sys.argv[1]).close();"
        "assert not {'torch', 'tensorflow', 'wandb'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_wandb_that_is_not_installed_is_an_error_at_the_start(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # what Python itself does for a module that must not be imported
    with pytest.raises(UserError, match=r"--use-wandb needs the package wandb: pip install 'vime\[wandb\]'"):
        WandB({}, {})


class FakeWandB:
    """Records what would reach the service."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return call

    def arguments(self, name):
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandB()
    monkeypatch.setattr(trackers, "_import_wandb", lambda: fake)
    return fake


def test_wandb_gets_given_options_only(wandb):
    WandB({"project": "p", "mode": "offline", "id": None}, {"lr": 1}, key="secret")
    [(_, kwargs)] = wandb.arguments("init")
    assert kwargs == {"project": "p", "mode": "offline", "config": {"lr": 1}, "resume": None, "settings": None}
    assert wandb.arguments("login") == []  # offline needs no key


def test_wandb_continues_a_run_by_its_id(wandb):
    WandB({"id": "abc"}, {}, key="secret", host="http://wandb.local")
    assert wandb.arguments("init")[0][1]["resume"] == "allow"
    assert wandb.arguments("login") == [((), {"key": "secret", "host": "http://wandb.local"})]


def test_wandb_gets_both_axes(wandb):
    tracker = WandB({}, {})
    tracker.log({"train/loss": 0.5}, rollout_id=3, step=12)
    assert wandb.arguments("log") == [(({"train/loss": 0.5, "rollout_id": 3, "step": 12},), {})]
    assert (("train/*",), {"step_metric": "step"}) in wandb.arguments("define_metric")


@pytest.mark.parametrize(("flag", "axis"), [(False, "rollout_id"), (True, "step")])
def test_wandb_draws_what_is_not_of_training_over_rollouts_or_as_a_flag_says_over_steps(tmp_path, wandb, flag, axis):
    from vime.config.sections.ops import Ops

    run = {"run_dir": str(tmp_path), "tensorboard_dir": str(tmp_path / "curves")}
    trackers_for(Ops(**run, use_wandb=True, wandb_always_use_train_step=flag), {})
    assert (("*",), {"step_metric": axis}) in wandb.arguments("define_metric")


def test_wandb_runs_offline(tmp_path):
    pytest.importorskip("wandb")
    code = (
        "import sys; from vime.observe.trackers import WandB;"
        "t = WandB({'mode': 'offline', 'project': 'p', 'dir': sys.argv[1]}, {'a': 1});"
        "t.log({'train/loss': 0.5}, rollout_id=0, step=1); t.close()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, timeout=120)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_the_flags_choose_the_trackers(tmp_path, wandb):
    from vime.config.sections.ops import Ops

    run = {"run_dir": str(tmp_path), "tensorboard_dir": str(tmp_path / "curves")}
    assert [tracker.name for tracker in trackers_for(Ops(**run), {})] == ["TensorBoard"]
    assert list((tmp_path / "curves").glob("events*"))
    both = trackers_for(Ops(**run, use_wandb=True, wandb_team="us"), {})
    assert [tracker.name for tracker in both] == ["TensorBoard", "wandb"]
    assert wandb.arguments("init")[0][1]["entity"] == "us"
