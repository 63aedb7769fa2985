"""What the training loop tells: to the display, the record and the accounts of time at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from vime.naming import evaluation_name
from vime.observe.phases import PhaseTimer
from vime.observe.progress import Progress
from vime.observe.recorder import RunRecorder
from vime.observe.summary import Summary, eval_results, eval_rows
from vime.types import RolloutBatch, TrainResult

__all__ = ["RunReport"]


class RunReport:
    """Implements ``loop.Report``.

    Args:
        rollouts, steps: rollouts and optimizer steps that were done before this process, by a run that it resumes.
        first_evals: the first evaluation of the run that is resumed, for the final table.
    """

    def __init__(
        self,
        recorder: RunRecorder,
        progress: Progress,
        *,
        clock: Callable[[], float],
        rollouts: int = 0,
        steps: int = 0,
        first_evals: Mapping[str, float] | None = None,
    ) -> None:
        self._recorder = recorder
        self._progress = progress
        self._clock = clock
        self._began = clock()
        self._timer = PhaseTimer(clock)
        self._earlier = rollouts, steps
        self.steps = steps
        self.first_evals = dict(first_evals or {})
        self._last_evals: dict[str, float] = {}
        self._rollouts = rollouts
        self._noted: dict[str, float] = {}
        self._sources: list[Callable[[], Mapping[str, float]]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self._timer.phase(name), self._progress.phase(name):
            yield

    def evaluated(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """Writes an evaluation under the weights before ``rollout_id``."""
        self._recorder.log(metrics, rollout_id=rollout_id, step=self.steps)
        self._last_evals = metrics
        self.first_evals = self.first_evals or metrics
        means = "  ".join(f"{name} {value:.3f}" for name, value in eval_results(metrics).items())
        self._progress.log(f"{evaluation_name(rollout_id)}: {means}")
        self._progress.update(metrics)

    def note(self, metrics: Mapping[str, float]) -> None:
        """Takes metrics of the rollout that is being made; they are written with it."""
        self._noted |= metrics

    def ask(self, source: Callable[[], Mapping[str, float]]) -> None:
        """Has metrics of each rollout from there, from now on: what has happened since it was asked before."""
        self._sources.append(source)

    def say(self, line: str) -> None:
        """Tells people something that happened."""
        self._progress.log(line)

    def trained(self, batch: RolloutBatch, result: TrainResult) -> None:
        """Writes one row an optimizer step; the last one also has what is said of the rollout as a whole."""
        whole = {**batch.metrics, **self._timer.lap().metrics(), **result.memory, **self._noted}
        self._noted = {}
        for source in self._sources:
            whole |= source()
        if "perf/phase_time/sync" in whole:
            whole["perf/update_weights_time"] = whole["perf/phase_time/sync"]
        for number, step in enumerate(result.steps, start=1):
            self.steps += 1
            row = step | whole if number == len(result.steps) else step
            self._recorder.log(row, rollout_id=batch.rollout_id, step=self.steps)
        self._rollouts += 1
        self._progress.update({**result.steps[-1], **whole}, rollout_id=batch.rollout_id)

    def finish(self, *, peak_memory_bytes: int | None, resume_command: str | None) -> None:
        """Shows the table at the end of a run."""
        earlier_rollouts, earlier_steps = self._earlier
        summary = Summary(
            rollouts=self._rollouts,
            steps=self.steps,
            earlier_rollouts=earlier_rollouts,
            earlier_steps=earlier_steps,
            seconds=self._clock() - self._began,
            run_dir=str(self._recorder.run_dir),
            evals=eval_rows(self.first_evals, self._last_evals),
            phase_seconds=self._timer.totals(),
            peak_memory_bytes=peak_memory_bytes,
            resume_command=resume_command,
        )
        self._progress.finish(summary)
