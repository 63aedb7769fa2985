"""What a person sees of a run: a live display on a terminal, single plain lines everywhere else.

The display has three lines of fixed height, redrawn by rich four times a second, and log lines scroll above it. Without
a terminal (CI logs, ``ray job`` output, files) a phase is announced when it first runs, and each rollout gives a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vime.naming import rollout_name
from vime.observe.console import text_console
from vime.observe.metrics import split_finite
from vime.observe.summary import Summary, duration

__all__ = ["Progress", "sparkline"]

REWARD = "rollout/raw_reward"
LOSS = "train/loss"
"""What is watched where nothing is rewarded."""

OF_THE_LAST = frozenset({"evaluate", "save"})
"""Phases that belong to the rollout that was trained before they began."""

BARS = "▁▂▃▄▅▆▇█"
TREND = 24
"""Rewards or losses in the small curve."""


class Progress:
    """Shows phases, metrics and time left. A context manager: the terminal is its own again afterwards.

    Args:
        total: rollouts of the whole run.
        clock: seconds, from any origin. Also called from the thread that redraws the display.
        start: the first rollout, above 0 on a resumed run.
        console: where to write; standard output by default.
    """

    def __init__(
        self, total: int, *, clock: Callable[[], float], start: int = 0, console: Console | None = None
    ) -> None:
        self._total = total
        self._clock = clock
        self._start = self._rollout = start
        self._console = console or text_console()
        self._began = self._last_end = clock()
        self._phases: tuple[tuple[str, float], ...] = ()  # running ones and when they began, oldest first
        self._seen: set[str] = set()
        # what the drawing thread reads is replaced, never changed in place
        self._metrics: dict[str, float] = {}
        self._trend: tuple[float, ...] = ()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._display, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Shows ``name`` (generate, reward, train, sync, evaluate, save) while the block runs. Phases may overlap."""
        entry = (name, self._clock())
        self._phases = (*self._phases, entry)
        if name not in self._seen:
            self._seen.add(name)
            self._enter_first(*entry)
        try:
            yield
        finally:
            self._phases = _without(self._phases, entry)

    def update(self, metrics: Mapping[str, float], *, rollout_id: int | None = None) -> None:
        """Shows new values of metrics.

        With ``rollout_id`` that rollout is over: the count goes up and, without a display, a line is written.
        """
        finite, _ = split_finite(metrics)
        self._metrics = {**self._metrics, **finite}
        if rollout_id is None:
            return
        self._rollout = rollout_id + 1
        self._last_end = self._clock()
        watched = [finite[name] for name in (REWARD, LOSS) if name in finite][:1]
        self._trend = (*self._trend, *watched)[-TREND:]
        if self._live is None:
            self.log(self._line(rollout_id))

    def log(self, line: str) -> None:
        """Writes one line, above the display where there is one."""
        self._console.print(Text(line), soft_wrap=True)

    def finish(self, summary: Summary) -> None:
        """Ends the display and writes the summary."""
        self._stop()
        self._console.print(summary)
        for line in summary.lines():  # to be pasted: never wrapped
            self.log(line)

    def _enter_first(self, name: str, now: float) -> None:
        if name == "generate":
            self._began = now  # the start-up says nothing about the time that rollouts take
        if self._live is None:
            self.log(f"{self._place()}: {name}")

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _place(self) -> str:
        ended = self._rollout > 0 and any(name in OF_THE_LAST for name, _ in self._phases)
        return f"rollout {min(self._rollout + (not ended), self._total)} of {self._total}"

    def _line(self, rollout_id: int) -> str:
        parts = [f"{rollout_name(rollout_id)} of {self._total}", *_readings(self._metrics), self._time_left()]
        return "  ".join(filter(None, parts))

    def _time_left(self) -> str:
        """As long as the finished rollouts took, each; while one is running the time counts down."""
        done, left = self._rollout - self._start, self._total - self._rollout
        if not (done and left):
            return ""
        each = (self._last_end - self._began) / done
        return f"left {duration(max(each * left - (self._clock() - self._last_end), 0))}"

    def _display(self) -> RenderableType:
        """Always three lines, each cut at the width of the terminal: a display that changes its height flickers."""
        readings = _readings(self._metrics)
        return Group(self._headline(), _line_of([*readings[:1], sparkline(self._trend)]), _line_of(readings[1:]))

    def _headline(self) -> Table:
        table = Table.grid(padding=(0, 2), expand=False)
        for _ in range(4):
            table.add_column(no_wrap=True, overflow="ellipsis")
        now = self._clock()
        phases = ", ".join(f"{name} {duration(now - began)}" for name, began in self._phases)
        bar = ProgressBar(total=max(self._total, 1), completed=self._rollout, width=20)
        table.add_row(self._place(), bar, Text(phases or "waiting", style="bold"), self._time_left())
        return table


def _without(phases: tuple[tuple[str, float], ...], entry: tuple[str, float]) -> tuple[tuple[str, float], ...]:
    index = phases.index(entry)
    return (*phases[:index], *phases[index + 1 :])


def _line_of(parts: Sequence[str]) -> Text:
    return Text("  ".join(filter(None, parts)), no_wrap=True, overflow="ellipsis")


_READINGS: tuple[tuple[str, Callable[[float], str]], ...] = (
    (REWARD, lambda value: f"reward {value:.3f}"),
    ("rollout/response_len/mean", lambda value: f"length {value:.0f}"),
    ("rollout/response_len/max", lambda value: f"max {value:.0f}"),
    ("rollout/truncated_ratio", lambda value: f"truncated {value:.0%}"),
    ("perf/tokens_per_gpu_per_sec", lambda value: f"{value:,.0f} tokens/s/slot"),
    ("train/train_rollout_logprob_abs_diff", lambda value: f"log-prob difference {value:.4f}"),
    ("train/grad_norm", lambda value: f"gradient {value:.2g}"),
    ("perf/step_time", lambda value: f"step {duration(value)}"),
)


def _readings(metrics: Mapping[str, float]) -> list[str]:
    """The metrics that a person watches, in a fixed order, the reward or else the loss first."""
    loss = f"loss {metrics[LOSS]:.4f}" if LOSS in metrics else ""
    first = [] if REWARD in metrics else [loss]
    return first + [show(metrics[name]) for name, show in _READINGS if name in metrics]


def sparkline(values: Sequence[float]) -> str:
    """A curve of one character a value, from the lowest to the highest of them; flat where all are equal."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    span = high - low
    heights = [round((value - low) / span * (len(BARS) - 1)) if span > 0 else 0 for value in values]
    return "".join(BARS[height] for height in heights)
