"""Trains the demo's model with each advantage estimator on this machine's CPU, and writes the table of the curves.

    python tools/compare_estimators.py                       # all of them, into docs/en/algorithms.md
    python tools/compare_estimators.py grpo cispo --print    # some, to standard output
    make demo                                                # fetches the model and writes the task, once

Runs are kept under runs/estimators; one that is complete is not run again.

A run has 12 rollouts of 64 answers with 2 optimizer steps each, so that ratios and clips matter: with one step all
group-relative estimators have the same gradient.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "en" / "algorithms.md"
BEGIN, END = "<!-- made by tools/compare_estimators.py -->", "<!-- end -->"

ROLLOUTS, STEPS = 12, 2
WINDOW = 3
"""Rollouts whose mean reward is one number of the table."""

WHITEN = ["--normalize-advantages"]
ESTIMATORS: Mapping[str, Sequence[str]] = {
    "grpo": [],
    "gspo": ["--eps-clip", "0.02", "--eps-clip-high", "0.03"],
    "cispo": [],
    "reinforce_plus_plus": WHITEN,
    "reinforce_plus_plus_baseline": WHITEN,
    "ppo": [*WHITEN, "--critic-lr", "1e-4"],
}
"""With what each needs beside the flags of the demo."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What a run said of itself."""

    rewards: tuple[float, ...]  # mean of each rollout
    held_out: float  # share of right answers to sums that were not trained on, at temperature 1
    clipped: float  # mean share of clipped tokens

    def window(self, first: int) -> float:
        return sum(self.rewards[first : first + WINDOW]) / WINDOW

    @property
    def start(self) -> float:
        return self.window(0)

    @property
    def end(self) -> float:
        return self.window(len(self.rewards) - WINDOW)


def train(estimator: str, folder: Path) -> Curve:
    """One run, which leaves its record in ``folder``, and no model.

    Raises:
        subprocess.CalledProcessError: the run failed; its output has been shown.
    """
    flags = ["--advantage-estimator", estimator, *ESTIMATORS[estimator]]
    flags += ["--num-rollout", str(ROLLOUTS), "--global-batch-size", str(64 // STEPS), "--no-save-optim"]
    flags += ["--eval-interval", str(ROLLOUTS), "--skip-eval-before-train"]
    script = ["bash", "scripts/run-smollm2-135M-cpu.sh", *flags]
    done = subprocess.run(script, cwd=ROOT, env={**os.environ, "RUN": str(folder)}, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
        done.check_returncode()
    for checkpoint in folder.glob("iter_*"):
        shutil.rmtree(checkpoint)
    curve = read(folder)
    assert curve is not None, "a run that ends well is complete"
    return curve


def read(folder: Path) -> Curve | None:
    """What a run left; None unless it is complete."""
    record = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    rollouts = [row for row in rows if "rollout/raw_reward" in row]
    if len(rollouts) < ROLLOUTS or not any("eval/arithmetic" in row for row in rows):
        return None
    return Curve(
        rewards=tuple(row["rollout/raw_reward"] for row in rollouts),
        held_out=_last(rows, "eval/arithmetic"),
        clipped=_mean([row["train/pg_clipfrac"] for row in rows if "train/pg_clipfrac" in row]),
    )


def _last(rows: Sequence[dict[str, Any]], name: str) -> float:
    return float([row[name] for row in rows if name in row][-1])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def table(curves: Mapping[str, Curve]) -> str:
    """Markdown."""
    windows = range(0, ROLLOUTS, WINDOW)
    names = [f"{first + 1}-{first + WINDOW}" for first in windows]
    head = ["estimator", *names, "held out", "clipped tokens"]
    lines = [_row(head), _row(["---"] * len(head))]
    for name, curve in curves.items():
        rewards = [f"{curve.window(first):.2f}" for first in windows]
        lines.append(_row([name, *rewards, f"{curve.held_out:.2f}", f"{curve.clipped:.1%}"]))
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write(text: str) -> None:
    """Replaces the table of the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("estimators", nargs="*", default=list(ESTIMATORS), metavar="estimator")
    parser.add_argument("--print", action="store_true", help="leave the page as it is")
    arguments = parser.parse_args()
    curves = {}
    for name in arguments.estimators:
        folder = ROOT / "runs" / "estimators" / name
        curves[name] = read(folder) or train(name, folder)
        print(name, *(f"{reward:.2f}" for reward in curves[name].rewards), flush=True)
    if arguments.print:
        print(table(curves))
    else:
        write(table(curves))


if __name__ == "__main__":
    main()
