"""The run's record and display, and where a resumed run takes up the thread."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from vime.checkpoints import STATE, CheckpointStore, ResumePoint, older_may_do
from vime.config import Config
from vime.config.rules.base import is_given
from vime.errors import DamagedFile, UserError
from vime.files import writing
from vime.folder_lock import locked
from vime.naming import rollout_name
from vime.observe.progress import Progress
from vime.observe.recorder import RunRecorder
from vime.observe.report import RunReport
from vime.observe.trackers import trackers_for

OF_A_RUN = {"metrics_position", "source"}
"""What the state of every run has."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a run writes and shows, and the checkpoint that it goes on from."""

    recorder: RunRecorder
    report: RunReport
    resumed: ResumePoint | None  # None: a fresh run

    @property
    def start(self) -> int:
        """The first rollout of this process."""
        return self.resumed.next_rollout_id if self.resumed is not None else 0

    def driver_state(self) -> dict[str, object]:
        """What of this belongs into a checkpoint."""
        return {
            "metrics_position": self.recorder.position(),
            "steps": self.report.steps,
            "first_evals": self.report.first_evals,
        }


@contextmanager
def open_record(config: Config, *, total: int) -> Iterator[Record]:
    """Opens the run folder and the display for the time of the block.

    Args:
        total: rollouts of the whole run.

    Raises:
        UserError: a folder cannot be written, or another run writes there; or there is no way to resume.
    """
    with own_folders(config):
        yield from _opened(config, total)


def _opened(config: Config, total: int) -> Iterator[Record]:
    resumed = _resume_point(config)
    shown = config.to_dict()
    recorder = RunRecorder(config.ops.run_dir, trackers=trackers_for(config.ops, shown))
    try:
        recorder.write_config(shown)
        state = resumed.state if resumed is not None and resumed.state is not None else {}
        if state:
            recorder.restore(int(state["metrics_position"]))
        start = resumed.next_rollout_id if resumed is not None else 0
        with Progress(total, clock=time.monotonic, start=start) as progress:
            _say_where(progress, config, resumed)
            report = RunReport(
                recorder,
                progress,
                clock=time.monotonic,
                rollouts=start,
                steps=int(state.get("steps", 0)),
                first_evals=state.get("first_evals"),
            )
            yield Record(recorder=recorder, report=report, resumed=resumed)
    finally:
        recorder.close()


def with_new_run_dir(config: Config) -> Config:
    """The configuration with a run folder that was made for this run alone, where the flags do not name one.

    Its name is the second in which the run started; a further run of that second gets a number behind it.

    Raises:
        UserError: no folder can be made there.
    """
    if config.checkpoint.save is not None or is_given(config, "run_dir"):
        return config
    wanted = Path(config.ops.run_dir)
    with writing(wanted):
        wanted.parent.mkdir(parents=True, exist_ok=True)
        run_dir = _made_new(wanted)
    own = is_given(config, "tensorboard_dir")
    tensorboard_dir = config.ops.tensorboard_dir if own else str(run_dir / "tensorboard")
    return replace(config, ops=replace(config.ops, run_dir=str(run_dir), tensorboard_dir=tensorboard_dir))


def _made_new(wanted: Path) -> Path:
    names = itertools.chain([wanted.name], (f"{wanted.name}-{number}" for number in itertools.count(2)))
    for folder in map(wanted.with_name, names):
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("numbers do not end")


@contextmanager
def own_folders(config: Config) -> Iterator[None]:
    """In the block no other run writes to the folders that this one writes to, and nothing half-done is left in them.

    Raises:
        UserError: a run, or a process that saves, is there; or a folder cannot be written.
    """
    roots = {"--save": config.checkpoint.save, "--critic-save": config.critic.critic_save}
    folders = roots | {"--run-dir": config.ops.run_dir}
    if config.engine.update_weight_transport == "disk":
        folders["--update-weight-disk-dir"] = config.engine.update_weight_disk_dir
    with ExitStack() as stack:
        seen = set()
        for flag, folder in folders.items():
            if folder is not None and (place := Path(folder).resolve()) not in seen:
                seen.add(place)
                stack.enter_context(locked(folder, flag))
        for root in roots.values():
            if root is not None:
                CheckpointStore(root).clear()
        yield


def _resume_point(config: Config) -> ResumePoint | None:
    """The checkpoint in --load, if there is one that a run of ours saved."""
    if config.checkpoint.load is None:
        return None
    root = config.checkpoint.load
    found = CheckpointStore(root).resolve(config.checkpoint.ckpt_step)
    if found is not None and found.state is not None and not found.state.keys() >= OF_A_RUN:
        if found.state.keys() == {"id"}:
            raise UserError(f"--load {root}: that is the root of a critic; give it as --critic-load")
        with older_may_do(found.directory):
            lacks = ", ".join(sorted(OF_A_RUN - found.state.keys()))
            raise DamagedFile(f"{found.directory / STATE}: lacks {lacks}")
    return found


def _say_where(progress: Progress, config: Config, resumed: ResumePoint | None) -> None:
    progress.log(f"results in {config.ops.run_dir}")
    if config.checkpoint.load is not None:
        progress.log(beginning(config, resumed))


def beginning(config: Config, resumed: ResumePoint | None) -> str:
    """What a run with --load starts from, for a person."""
    load, start = config.checkpoint.load, config.checkpoint.ref_load or config.checkpoint.hf_checkpoint
    if resumed is not None and not resumed.weights_only:
        return f"resuming from {resumed.directory}: the next rollout is number {resumed.next_rollout_id + 1}"
    if resumed is not None:
        return f"the run starts from the weights in {resumed.directory}, which has no more of a run than those"
    if (Path(load or "") / "config.json").is_file():
        return f"the run starts from the weights in {load}"
    return f"no checkpoint in {load} yet: the run starts from {start}"


def what_is_kept(config: Config) -> list[str]:
    """For a run that was interrupted: what is saved of it and how to go on from there, or why nothing is."""
    save, interval = config.checkpoint.save, config.checkpoint.save_interval
    try:
        found = None if save is None else CheckpointStore(save).resolve()
    except UserError as error:
        return [str(error)]
    if found is not None and not found.weights_only:
        return [f"saved: {found.directory}, after {rollout_name(found.iteration)}", f"Continue: {_command(config, {})}"]
    if save is None:
        return ["nothing was saved: no --save"]
    return [f"nothing was saved{': no --save-interval' if interval is None else f' yet: --save-interval {interval}'}"]


def resume_command(config: Config) -> str | None:
    """The command that goes on from this run's end, for as long again; None where nothing was saved."""
    if config.checkpoint.save is None:
        return None
    return _command(config, {"--num-rollout": f"{2 * (config.rollout.num_rollout or 1)}"}, without=("--num-epoch",))


def _command(config: Config, given: dict[str, str], without: tuple[str, ...] = ()) -> str:
    """This run's command line with the last checkpoint to load, other values of some flags, and without others."""
    given = {"--load": str(config.checkpoint.save), **given}
    if config.critic.critic_save is not None:
        given["--critic-load"] = config.critic.critic_save
    words = _replaced([word for word in sys.argv if word], given, without=("--ckpt-step", "--wandb-key", *without))
    inside = Path(sys.executable).is_relative_to(Path.cwd())
    return shlex.join([os.path.relpath(sys.executable) if inside else sys.executable, *words])


def _replaced(words: list[str], values: dict[str, str], without: tuple[str, ...] = ()) -> list[str]:
    """A command line in which the flags of ``values`` have those values, whatever they had, and some are left out."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
            continue
        name = word.partition("=")[0]
        if name in values or name in without:
            skip = "=" not in word
            continue
        kept.append(word)
    return kept + [part for item in values.items() for part in item]
