"""A checkpoint is whole or not there, whatever happens while it is written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.disk import files_end_at
from vime.checkpoints import COMPLETE, STATE, TRACKER, CheckpointStore
from vime.errors import UserError
from vime.unfinished import identity


def save(root: Path, rollout_id: int, **state: object) -> Path:
    store = CheckpointStore(root)
    (store.begin(rollout_id) / "common.pt").write_text(json.dumps(state))
    return store.commit(rollout_id, state)


def plain_megatron(root: Path, name: str, tracker: str) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text("{}")
    (root / TRACKER).write_text(tracker)
    return folder


def hidden(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name.startswith(".")]


def test_layout_is_megatrons_with_our_state_and_marker(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 20, cursor=7)
    assert folder == tmp_path / "run" / "iter_0000020"
    assert (tmp_path / "run" / TRACKER).read_text().strip() == "20"
    assert {path.name for path in folder.iterdir()} == {"common.pt", STATE, COMPLETE}
    assert hidden(tmp_path / "run") == []


def test_resume_continues_after_the_saved_rollout_with_its_state(tmp_path: Path) -> None:
    save(tmp_path, 3, cursor=1)
    save(tmp_path, 6, cursor=2)
    point = CheckpointStore(tmp_path).resolve()
    assert point is not None
    assert (point.iteration, point.next_rollout_id, point.state) == (6, 7, {"cursor": 2})
    assert not point.weights_only


def test_every_file_and_folder_is_on_the_disk_before_the_marker_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the folders of critic and reference, and what lies in them."""
    synced: list[str] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    store = CheckpointStore(tmp_path)
    work = store.begin(1)
    for name in ("critic", "ref"):
        (work / name / "inside").mkdir(parents=True)
        (work / name / "inside" / f"{name} weights").touch()
    synced.clear()
    store.commit(1, {})
    expected = {"critic", "ref", "inside", "critic weights", "ref weights", STATE}
    assert expected <= set(synced[: synced.index(COMPLETE)])
    assert synced.index(COMPLETE) < synced.index(work.name), "the folder has the marker"


def test_ckpt_step_picks_an_older_one_and_the_next_save_is_the_new_latest(tmp_path: Path) -> None:
    for rollout_id in (3, 6):
        save(tmp_path, rollout_id, cursor=rollout_id)
    older = CheckpointStore(tmp_path).resolve(ckpt_step=3)
    assert older is not None and older.state == {"cursor": 3}
    save(tmp_path, 4, cursor=40)
    newest = CheckpointStore(tmp_path).resolve()
    assert newest is not None and newest.iteration == 4  # 6 belongs to the abandoned continuation


def test_a_wrong_ckpt_step_lists_those_that_are_there(tmp_path: Path) -> None:
    save(tmp_path, 3)
    save(tmp_path, 6)
    with pytest.raises(UserError, match=r"--ckpt-step 5: .* no whole iter_0000005; there are: 3, 6"):
        CheckpointStore(tmp_path).resolve(ckpt_step=5)


@pytest.mark.parametrize("make_root", [False, True])
def test_nothing_saved_yet_means_nothing_to_resume(tmp_path: Path, make_root: bool) -> None:
    if make_root:
        (tmp_path / "root").mkdir()
    assert CheckpointStore(tmp_path / "root").resolve() is None


def test_one_checkpoint_instead_of_the_root_is_told(tmp_path: Path) -> None:
    folder = save(tmp_path, 6)
    with pytest.raises(UserError, match=rf"give its root, {tmp_path} and --ckpt-step 6"):
        CheckpointStore(folder).resolve()


@pytest.mark.parametrize("tracker", [b"", b"7", b"garbage", None, b"\xff\xfe", b"6" * 5000, "\u0666".encode(), b"\0"])
@pytest.mark.parametrize("name", [TRACKER, f".{TRACKER}.next"])
def test_a_bad_tracker_is_overruled_by_the_newest_whole_checkpoint(
    tmp_path: Path, tracker: bytes | None, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 3)
    save(tmp_path, 6)
    (tmp_path / TRACKER).unlink()
    if tracker is not None:
        (tmp_path / name).write_bytes(tracker)
    point = CheckpointStore(tmp_path).resolve()
    assert point is not None and point.iteration == 6
    assert "taking the newest whole one, 6" in caplog.text


def test_an_incomplete_checkpoint_is_not_taken(tmp_path: Path) -> None:
    save(tmp_path, 3)
    (save(tmp_path, 6) / COMPLETE).unlink()
    point = CheckpointStore(tmp_path).resolve()
    assert point is not None and point.iteration == 3


def test_a_tracker_without_any_checkpoint_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("5")
    with pytest.raises(UserError, match="says '5', but no whole checkpoint is there"):
        CheckpointStore(tmp_path).resolve()


@pytest.mark.parametrize(("name", "tracker"), [("iter_0000100", "100"), ("release", "release")])
def test_a_plain_megatron_checkpoint_gives_weights_only(tmp_path: Path, name: str, tracker: str) -> None:
    folder = plain_megatron(tmp_path, name, tracker)
    point = CheckpointStore(tmp_path).resolve()
    assert point is not None and point.directory == folder
    assert point.weights_only and point.next_rollout_id == 0


def test_a_state_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.begin(1)
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.commit(1, {"loss": float("nan")})
    assert store.resolve() is None


def left_by(work: Path, mark: str) -> None:
    """As if the process of that mark had begun it."""
    work.rename(work.with_name(work.name.replace(identity(os.getpid()), mark)))


def test_two_runs_cannot_save_to_one_root(tmp_path: Path) -> None:
    left_by(CheckpointStore(tmp_path).begin(1), identity(os.getppid()))
    for find_out in (CheckpointStore(tmp_path).clear, lambda: CheckpointStore(tmp_path).begin(1)):
        with pytest.raises(UserError, match=rf"another process is saving there \(.*{identity(os.getppid())}.tmp\)"):
            find_out()


def test_what_a_dead_process_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    left_by(CheckpointStore(tmp_path).begin(1), f"{dead.pid}-1")
    save(tmp_path, 2)
    assert hidden(tmp_path) == []


def test_what_a_dead_process_left_is_removed_though_another_has_its_number(tmp_path: Path) -> None:
    pid, began = identity(os.getppid()).split("-")
    left_by(CheckpointStore(tmp_path).begin(1), f"{pid}-{int(began) - 1}")
    CheckpointStore(tmp_path).clear()
    assert hidden(tmp_path) == []


def test_what_an_older_version_left_is_told_where_its_process_may_live(tmp_path: Path) -> None:
    left_by(CheckpointStore(tmp_path).begin(1), str(os.getppid()))
    with pytest.raises(UserError, match=rf"\.{os.getppid()}\.tmp was left by .* remove it if no run saves there"):
        CheckpointStore(tmp_path).clear()


def test_what_somebody_put_into_a_checkpoint_that_is_saved_again_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        folder = save(tmp_path, 1, number=number)
        for name in (f"hf/export{number}", "critic/common.pt", "mp_rank_00/model_optim_rng.pt", "ref/__0_0.distcp"):
            (folder / name).parent.mkdir()
            (folder / name).touch()
    save(tmp_path, 1, number=3)
    kept = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*.replaced-*/**/*") if path.is_file()}
    assert kept == {"iter_0000001.replaced-1/hf/export1", "iter_0000001.replaced-2/hf/export2"}
    assert f"is in {tmp_path / 'iter_0000001.replaced-2'} now" in caplog.text
    assert CheckpointStore(tmp_path).iterations() == [1]
    save(tmp_path, 1, number=4)
    assert len(list(tmp_path.glob("*.replaced-*"))) == 2, "nothing but the checkpoint was in the third"


def test_a_save_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    store = CheckpointStore(tmp_path)
    (store.begin(2) / "common.pt").touch()
    store.discard(2)
    assert hidden(tmp_path) == []
    point = store.resolve()
    assert point is not None and point.iteration == 1


@pytest.mark.parametrize("room", [0, 4])
def test_a_full_disk_is_one_line_and_what_was_saved_before_counts(tmp_path: Path, room: int) -> None:
    save(tmp_path, 1, cursor=1)
    store = CheckpointStore(tmp_path)
    for rollout_id in (1, 2):
        work = store.begin(rollout_id)
        with (
            files_end_at(room),
            pytest.raises(UserError, match=rf"^{tmp_path}: cannot be written: File too large$"),
        ):
            store.commit(rollout_id, {"cursor": 12345})
        assert work.is_dir()
        point = CheckpointStore(tmp_path).resolve()
        assert point is not None and point.state == {"cursor": 1}


def test_a_root_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/root: cannot be written: Not a directory$"):
        CheckpointStore(tmp_path / "file" / "root").begin(1)


@pytest.mark.parametrize("state", [b"", b'{"cursor": ', b"[1]", b'{"a": "\xff"}', b"[" * 100_000])
def test_a_damaged_state_names_the_checkpoint_and_the_one_before(tmp_path: Path, state: bytes) -> None:
    save(tmp_path, 3)
    (save(tmp_path, 6) / STATE).write_bytes(state)
    with pytest.raises(UserError) as raised:
        CheckpointStore(tmp_path).resolve()
    said = str(raised.value)
    assert said.startswith(f"{tmp_path / 'iter_0000006' / STATE}: ") and "\n" not in said
    assert said.endswith("the checkpoint iter_0000006 is damaged: --ckpt-step 3 takes the one before")
    point = CheckpointStore(tmp_path).resolve(ckpt_step=3)
    assert point is not None and point.state == {}


def test_a_root_whose_name_is_too_long_is_one_line(tmp_path: Path) -> None:
    root = tmp_path / ("n" * 300)
    for doing, what in (
        (lambda: CheckpointStore(root).resolve(), "read"),
        (lambda: CheckpointStore(root).begin(1), "written"),
    ):
        with pytest.raises(UserError, match=rf"^{root}.*: cannot be {what}: File name too long$"):
            doing()


def test_of_a_damaged_state_without_any_before_it_is_said_so(tmp_path: Path) -> None:
    (save(tmp_path, 6) / STATE).write_text("")
    with pytest.raises(UserError, match=r"iter_0000006 is damaged: there is no older one$"):
        CheckpointStore(tmp_path).resolve()


SAVE_AND_DIE = textwrap.dedent("""
    import os, signal, sys
    from pathlib import Path
    from vime.checkpoints import CheckpointStore

    root, rollout_id, deadly = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    seen = 0

    def die_at_the_nth_touch_of_the_disk(event, args):
        global seen
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(root) in str(args):
            seen += 1
            if seen == deadly:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die_at_the_nth_touch_of_the_disk)
    store = CheckpointStore(root)
    (store.begin(rollout_id) / "common.pt").write_text('{"value": "new"}')
    store.commit(rollout_id, {"value": "new"})
""")


@pytest.mark.parametrize(("rollout_id", "before"), [(2, 1), (1, 1)], ids=["a further checkpoint", "saved again"])
def test_killed_at_any_moment_a_run_resumes_from_the_last_whole_checkpoint(
    tmp_path: Path, rollout_id: int, before: int
) -> None:
    outcomes = []
    for deadly in range(1, 100):
        root = tmp_path / str(deadly)
        save(root, before, value="old")
        arguments = [sys.executable, "-c", SAVE_AND_DIE, str(root), str(rollout_id), str(deadly)]
        code = subprocess.run(arguments, timeout=60).returncode
        assert code in (0, -signal.SIGKILL)
        point = CheckpointStore(root).resolve()
        assert point is not None and point.state is not None
        assert json.loads((point.directory / "common.pt").read_text()) == point.state
        assert point.iteration == (rollout_id if point.state["value"] == "new" else before)
        outcomes.append(point.state["value"])
        save(root, 3, value="later")
        after = CheckpointStore(root).resolve()
        assert after is not None and after.state == {"value": "later"}
        assert hidden(root) == []
        if code == 0:
            break
    assert len(outcomes) > 10
    assert outcomes == sorted(outcomes, reverse=True)  # "old" until it is "new"
    assert outcomes[-1] == "new"
