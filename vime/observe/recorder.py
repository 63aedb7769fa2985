"""The run's own record, in plain files under the run folder.

    metrics.jsonl                   one JSON object a row: rollout_id, step, and metrics by name
    samples/rollout_0000012.jsonl   one object a sample: prompt, response, reward …
    samples/eval_NAME_0000020.jsonl the same for an evaluation
    run_config.json                 the resolved configuration

Every row is on its way to the disk when ``log`` returns. A run that resumes first cuts metrics.jsonl back to where its
checkpoint was made, so no rollout has two rows; files of samples are replaced when their rollout runs again.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from vime.errors import UserError
from vime.files import append_whole, name_part, write_whole, writing
from vime.metadata import MAX_BITS, MAX_DEPTH
from vime.observe.metrics import ROW_KEYS, split_finite
from vime.observe.trackers import Tracker
from vime.types import Sample

__all__ = ["RunRecorder"]


class RunRecorder:
    """Implements ``ports.Recorder``.

    Args:
        run_dir: made if missing.
        trackers: where curves go besides; closed with the recorder.
        report: takes one line for a person when a tracker fails. The run goes on.

    Raises:
        UserError: here and in what writes: the disk is full, or takes nothing for another reason.
    """

    def __init__(
        self, run_dir: Path | str, *, trackers: Sequence[Tracker] = (), report: Callable[[str], None] = print
    ) -> None:
        self.run_dir = Path(run_dir)
        with writing(self.run_dir):
            self.run_dir.mkdir(parents=True, exist_ok=True)
        self._trackers = tuple(trackers)
        self._report = report
        self._failures: Counter[str] = Counter()
        self._metrics: FileIO | None = None

    @property
    def metrics_path(self) -> Path:
        return self.run_dir / "metrics.jsonl"

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes run_config.json. Secrets must have been masked."""
        write_whole(self.run_dir / "run_config.json", [json.dumps(_plain(config), indent=2) + "\n"])

    def log(self, metrics: Mapping[str, float], *, rollout_id: int, step: int) -> None:
        """Writes one row and passes it to the trackers.

        Metrics that are not finite are left out and named under "nonfinite" in the row.

        Raises:
            UserError: one has the name of what is a row's own.
        """
        finite, nonfinite = split_finite(metrics)
        for name in ROW_KEYS & metrics.keys():
            raise UserError(
                f"a metric cannot be named {name}, as what every row of metrics.jsonl has; name it otherwise"
            )
        row: dict[str, Any] = {"rollout_id": rollout_id, "step": step, **finite}
        if nonfinite:
            row["nonfinite"] = nonfinite
        with writing(self.metrics_path):
            if self._metrics is None:
                self._metrics = self._start_afresh()
            append_whole(self._metrics, json.dumps(row).encode() + b"\n")
        for tracker in self._trackers:
            self._guarded(tracker, partial(tracker.log, finite, rollout_id=rollout_id, step=step))

    def samples(self, rollout_id: int, samples: Sequence[Sample], *, name: str = "rollout") -> None:
        """Writes the samples of one rollout or evaluation, whole or not at all."""
        path = self.run_dir / "samples" / f"{name_part(name)}_{rollout_id:07d}.jsonl"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        write_whole(path, (json.dumps(_sample_row(sample), ensure_ascii=False) + "\n" for sample in samples))

    def position(self) -> int:
        """How many bytes of metrics.jsonl there are, for the checkpoint."""
        return self._metrics.tell() if self._metrics is not None else 0

    def restore(self, position: int) -> None:
        """Continues the file of an earlier run from a checkpoint's ``position``; what came after it is cut off.

        Where the file is missing or shorter (another run folder), what there is stays, but for a last row of which a
        machine that went down has written a part. To be called before ``log``.

        Raises:
            UserError: the row before that is none either.
        """
        assert self._metrics is None, "restore comes before the first row"
        with writing(self.metrics_path):
            self.metrics_path.touch()
            self._metrics = self.metrics_path.open("r+b", buffering=0)
            self._metrics.truncate(min(position, self._metrics.seek(0, os.SEEK_END)))
            step = self._end_last_row(self._metrics) + 1
        for tracker in self._trackers:
            self._guarded(tracker, partial(tracker.resume, step))

    def close(self) -> None:
        """Closes file and trackers. Reports how many rows a failing tracker lost."""
        for tracker in self._trackers:
            self._guarded(tracker, tracker.close)
            if self._failures[tracker.name] > 1:
                self._report(f"{tracker.name} failed {self._failures[tracker.name]} times; metrics.jsonl is complete")
        if self._metrics is not None:
            self._metrics.close()

    def _guarded(self, tracker: Tracker, action: Callable[[], None]) -> None:
        """Runs what a tracker does. Its first failure is reported; each is counted."""
        try:
            action()
        except Exception as error:
            self._failures[tracker.name] += 1
            if self._failures[tracker.name] == 1:
                self._report(f"{tracker.name} failed: {type(error).__name__}: {error}; the run goes on without it")

    def _end_last_row(self, metrics: FileIO) -> int:
        """Makes the file end with a whole row, and returns the step of it; -1 of an empty file."""
        metrics.seek(0)
        rows = metrics.readall().splitlines(keepends=True)
        if rows and _step_of(rows[-1]) is None:
            torn = f"{self.metrics_path}: its last row, {len(rows)}"
            metrics.truncate(metrics.tell() - len(rows.pop()))
            self._report(f"warning: {torn}, was not written to its end and is dropped")
        elif rows and not rows[-1].endswith(b"\n"):
            append_whole(metrics, b"\n")
        step = _step_of(rows[-1]) if rows else -1
        if step is None:
            raise UserError(f"{self.metrics_path}: row {len(rows)} is damaged; remove what is wrong, or the whole file")
        metrics.seek(0, os.SEEK_END)
        return step

    def _start_afresh(self) -> FileIO:
        """A new file; rows of another run in the same folder move to metrics.1.jsonl and so on."""
        if self.metrics_path.exists() and self.metrics_path.stat().st_size:
            self.metrics_path.rename(_free_name(self.metrics_path))
        return self.metrics_path.open("wb", buffering=0)


def _free_name(path: Path) -> Path:
    number = 1
    while (free := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    return free


def _step_of(row: bytes) -> int | None:
    """None: it is no row of metrics, or not a whole one."""
    try:
        return int(json.loads(row)["step"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _sample_row(sample: Sample) -> dict[str, Any]:
    """What a person wants to see of a sample. Token ids and log-probs are left to debug dumps."""
    grade = sample.grade
    return {
        "index": sample.index,
        "group_index": sample.group_index,
        **({} if sample.parent_index is None else {"parent_index": sample.parent_index}),
        "prompt": _plain(sample.prompt),
        "response": sample.response,
        "label": sample.label,
        "reward": _plain(sample.reward),
        "grade": None
        if grade is None
        else {"status": grade.status.value, "score": grade.score, "detail": grade.detail},
        "status": sample.status.value,
        "prompt_length": sample.prompt_length,
        "response_length": sample.response_length,
        "weight_versions": sorted(set(sample.weight_versions)),
        "removed": sample.remove_sample,
        "metadata": _plain(sample.metadata),
    }


def _plain(value: Any, depth: int = 0) -> Any:
    """``value`` as JSON can hold it: arrays as lists; numbers that are not finite or too long, other objects and what
    is nested too deep as text."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= MAX_BITS else f"an integer of {value.bit_length()} bits"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth > MAX_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, depth + 1) for item in value]
    return _plain(value.tolist(), depth + 1) if hasattr(value, "tolist") else str(value)
