"""What a run has come to: the table at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vime.observe.metrics import describe

__all__ = ["EvalRow", "Summary", "duration", "eval_results", "eval_rows"]

GREEDY = "-greedy"
"""How the name of an evaluation set ends that asks the same prompts at temperature 0."""

LOSS = "-loss"
"""How the name of an evaluation ends that is a loss on given dialogues, and no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRow:
    """Mean reward (or loss) on one evaluation set at the start and at the end; None where it was not measured."""

    name: str
    start: float | None = None
    end: float | None = None
    greedy_start: float | None = None
    greedy_end: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Everything that the final table shows, and the lines below it."""

    rollouts: int  # of the whole run, as optimizer steps are
    steps: int
    seconds: float  # of this process, as the phases are
    earlier_rollouts: int = 0  # those of ``rollouts`` that an earlier process did
    earlier_steps: int = 0
    run_dir: str
    evals: tuple[EvalRow, ...] = ()
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    resume_command: str | None = None  # None: nothing was saved, so there is nothing to resume

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [self._facts()]
        if self.evals:
            parts.append(self._eval_table())
        return Group(*parts)

    def lines(self) -> list[str]:
        """Where the results are, and how to go on: whole lines that can be pasted, however narrow the terminal is."""
        resume = [] if self.resume_command is None else [f"Continue: {self.resume_command}"]
        return [f"Results: {self.run_dir}", *resume]

    def _facts(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_row("Rollouts", _with_earlier(self.rollouts, self.earlier_rollouts))
        table.add_row("Optimizer steps", _with_earlier(self.steps, self.earlier_steps))
        table.add_row("Time", duration(self.seconds))
        for name, seconds in self.phase_seconds.items():
            share = f" ({seconds / self.seconds:.0%})" if self.seconds > 0 else ""
            table.add_row(f"  {name}", duration(seconds) + share)
        if self.peak_memory_bytes is not None:
            table.add_row("Peak memory", f"{self.peak_memory_bytes / 2**30:.2f} GiB")
        return table

    def _eval_table(self) -> Table:
        greedy = any(row.greedy_start is not None or row.greedy_end is not None for row in self.evals)
        headings = ["start", "end", "change", *(["greedy start", "greedy end"] if greedy else [])]
        losses = all(row.name.endswith(LOSS) for row in self.evals)
        table = Table("Mean loss" if losses else "Mean reward", title_justify="left")
        for heading in headings:
            table.add_column(heading, justify="right")
        for row in self.evals:
            change = row.end - row.start if row.start is not None and row.end is not None else None
            cells = [_number(row.start), _number(row.end), _number(change, sign="+")]
            table.add_row(
                Text(row.name.removesuffix(LOSS)),
                *cells,
                *([_number(row.greedy_start), _number(row.greedy_end)] if greedy else []),
            )
        return table


def eval_rows(start: Mapping[str, float], end: Mapping[str, float]) -> tuple[EvalRow, ...]:
    """One row an evaluation set, from the ``eval/…`` metrics at the start and at the end.

    A set NAME-greedy goes into the row of NAME, if there is one.
    """
    first, last = eval_results(start), eval_results(end)
    names = {**first, **last}
    return tuple(
        EvalRow(
            name=name,
            start=first.get(name),
            end=last.get(name),
            greedy_start=first.get(name + GREEDY),
            greedy_end=last.get(name + GREEDY),
        )
        for name in names
        if not (name.endswith(GREEDY) and name.removesuffix(GREEDY) in names)
    )


def eval_results(metrics: Mapping[str, float]) -> dict[str, float]:
    """The mean reward (or loss) of each evaluation set among ``metrics``, by the name of the set."""
    return {name.removeprefix("eval/"): value for name, value in metrics.items() if _is_result(name)}


def _is_result(name: str) -> bool:
    metric = describe(name)
    return metric is not None and metric.name in ("eval/{name}", "eval/{name}-loss")


def duration(seconds: float) -> str:
    """``9.4 s``, ``3:05`` (minutes), ``1:02:05`` (hours), ``2 d 01:00:00``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours == 0:
        return f"{minutes}:{rest:02}"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02}:{minutes:02}:{rest:02}" if days else f"{hours}:{minutes:02}:{rest:02}"


def _with_earlier(count: int, earlier: int) -> str:
    return f"{count:,}" + (f", {count - earlier:,} of them since it was resumed" if earlier else "")


def _number(value: float | None, *, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.3f}"
