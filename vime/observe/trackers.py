"""Where curves go besides metrics.jsonl. A tracker is a small class with ``log``, ``resume`` and ``close``.

Trackers are optional by nature: what they raise is reported by the recorder and does not end a run. Only what a user
asked for and cannot have at all (wandb that is not installed) is an error, at the start.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vime.errors import UserError
from vime.files import append_whole, writing

if TYPE_CHECKING:
    from vime.config.sections.ops import Ops

__all__ = ["TensorBoard", "Tracker", "WandB", "trackers_for"]


class Tracker(Protocol):
    """Takes metrics somewhere."""

    @property
    def name(self) -> str:
        """How messages name it."""

    def resume(self, step: int) -> None:
        """What was logged at ``step`` or later belongs to a run that was cut off there: hide it where possible."""

    def log(self, metrics: Mapping[str, float], *, rollout_id: int, step: int) -> None:
        """Takes finite numbers; ``step`` counts optimizer steps and never falls."""

    def close(self) -> None:
        """Sends what is left. Called once."""


class TensorBoard:
    """Writes event files. The x axis is the optimizer step for all curves, so that they can be laid over each other.

    Uses tensorboard's own records: neither TensorFlow nor torch is loaded for it. Its writer of files is left out: that
    has a thread, whose traceback would fill the screen when the disk is full, and leaves parts of records behind.

    Raises:
        UserError: there can be no file in ``directory``.
    """

    name = "TensorBoard"

    def __init__(self, directory: Path | str) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        with writing(directory):
            self._file = _new_event_file(Path(directory))
            self._records: Any = RecordWriter(self)
            self._add(self._events.Event(wall_time=_now(), file_version="brain.Event:2"))

    def write(self, record: bytes) -> None:
        """For tensorboard, to which this is the file."""
        append_whole(self._file, record)

    def resume(self, step: int) -> None:
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(self._events.Event(step=step, session_log=start))

    def log(self, metrics: Mapping[str, float], *, rollout_id: int, step: int) -> None:
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(self._events.Event(step=step, wall_time=_now(), summary=self._summaries.Summary(value=values)))

    def close(self) -> None:
        self._file.close()

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


def _new_event_file(directory: Path) -> FileIO:
    """Named as tensorboard expects it: later files continue earlier ones."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"events.out.tfevents.{int(_now()):010d}.{socket.gethostname()}.{os.getpid()}"
    for number in itertools.count():
        with suppress(FileExistsError):
            return open(directory / f"{stem}.{number}", "xb", buffering=0)
    raise AssertionError("numbers do not end")


class WandB:
    """Reports to Weights & Biases, also offline. ``train/*`` is drawn over steps, all else over rollouts or steps.

    Args:
        options: arguments of ``wandb.init`` (project, group, mode, dir, entity, id …); None means wandb's default.
        config: the resolved configuration, shown with the run.
        key: the API key; None: as the environment or ``wandb login`` says.
        host: the address of a server; None: wandb's own.
        always_steps: draw everything over steps.

    Raises:
        UserError: wandb is not installed.
    """

    name = "wandb"

    def __init__(
        self,
        options: Mapping[str, Any],
        config: Mapping[str, Any],
        *,
        key: str | None = None,
        host: str | None = None,
        always_steps: bool = False,
    ) -> None:
        wandb = _import_wandb()
        if key is not None and options.get("mode") not in ("offline", "disabled"):
            wandb.login(key=key, host=host)
        given = {name: value for name, value in options.items() if value is not None}
        settings = wandb.Settings(base_url=host) if host is not None else None
        self._run = wandb.init(
            **given, config=dict(config), resume="allow" if "id" in given else None, settings=settings
        )
        self._run.define_metric("*", step_metric="step" if always_steps else "rollout_id")
        self._run.define_metric("train/*", step_metric="step")

    def resume(self, step: int) -> None:
        """Nothing: the axes are metrics of their own, so what comes again is drawn at the same place."""

    def log(self, metrics: Mapping[str, float], *, rollout_id: int, step: int) -> None:
        self._run.log({**metrics, "rollout_id": rollout_id, "step": step})

    def close(self) -> None:
        self._run.finish()


def _import_wandb() -> Any:
    try:
        return import_module("wandb")
    except ImportError as error:
        raise UserError(f"--use-wandb needs the package wandb: pip install 'vime[wandb]' ({error})") from None


def _now() -> float:
    import time

    return time.time()


def trackers_for(ops: Ops, config: Mapping[str, Any]) -> list[Tracker]:
    """The trackers that the flags ask for: TensorBoard always, wandb with --use-wandb.

    Args:
        ops: the flags.
        config: the resolved configuration with secrets masked.
    """
    trackers: list[Tracker] = [TensorBoard(ops.tensorboard_dir)]
    if ops.use_wandb:
        directory = ops.wandb_dir or ops.run_dir
        with writing(directory):
            os.makedirs(directory, exist_ok=True)
        options = {
            "project": ops.wandb_project,
            "group": ops.wandb_group,
            "mode": ops.wandb_mode,
            "dir": directory,
            "entity": ops.wandb_team,
            "id": ops.wandb_run_id,
        }
        steps = ops.wandb_always_use_train_step
        trackers.append(WandB(options, config, key=ops.wandb_key, host=ops.wandb_host, always_steps=steps))
    return trackers
