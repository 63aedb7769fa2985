"""The run's record and display, and where a resumed run takes up the thread."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vime.checkpoints import CheckpointStore, ResumePoint
from vime.config import Config
from vime.errors import UserError
from vime.observe.progress import Progress
from vime.observe.recorder import RunRecorder
from vime.observe.report import RunReport
from vime.observe.trackers import trackers_for


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
    """
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


def _resume_point(config: Config) -> ResumePoint | None:
    """The checkpoint in --load, if there is one that a run of ours saved."""
    if config.checkpoint.load is None:
        return None
    root = config.checkpoint.load
    found = CheckpointStore(root).resolve(config.checkpoint.ckpt_step)
    if found is not None and found.state is not None and "metrics_position" not in found.state:
        raise UserError(f"--load {root}: that is the root of a critic; give it as --critic-load")
    return found


def _say_where(progress: Progress, config: Config, resumed: ResumePoint | None) -> None:
    progress.log(f"results in {config.ops.run_dir}")
    if resumed is not None and not resumed.weights_only:
        progress.log(f"resuming from {resumed.directory}: the next rollout is number {resumed.next_rollout_id + 1}")


def resume_command(config: Config) -> str | None:
    """The command that goes on from this run's last checkpoint; None where nothing was saved."""
    save = config.checkpoint.save
    if save is None:
        return None
    given = {"--load": save, "--num-rollout": f"{2 * (config.rollout.num_rollout or 1)}"}
    if config.critic.critic_save is not None:
        given["--critic-load"] = config.critic.critic_save
    words = _replaced([word for word in sys.argv if word], given, without=("--num-epoch", "--wandb-key"))
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
