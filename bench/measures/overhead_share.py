"""overhead_share: the share of a step of the demo that is none of generate, reward, train and sync.

A real run of the demo's script, a few steps long, by what it writes to metrics.jsonl. Work is what does it, by its own
clock: sampling with grading, the trainer's passes, the sync. So calls through Ray, conversion of samples to batches and
everything between the phases are overhead here, although the run's own ``perf/overhead_share`` counts as work whatever
happens in a phase; that number stands beside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.stats import Spread
from bench.work import SCRIPT, need_model

STEPS = 8
STEP = "perf/step_time"


def measure(folder: Path) -> dict[str, Any]:
    need_model()
    run = folder / "run"
    flags = ("--num-rollout", str(STEPS), "--skip-eval-before-train")
    subprocess.run(["bash", str(SCRIPT), *flags], check=True, stdout=sys.stderr, env={**os.environ, "RUN": str(run)})
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return summarize([row for row in rows if STEP in row])


def summarize(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Spreads over the steps of a run. Raises RuntimeError when it made fewer than it should."""
    if len(rows) != STEPS:
        raise RuntimeError(f"metrics.jsonl has {len(rows)} rows with {STEP}, not {STEPS}")
    share = _spread([1 - work_s(row) / row[STEP] for row in rows])
    phases = sorted({name for row in rows for name in row if name.startswith("perf/phase_time/")})
    return {
        "value": share["median"],
        "unit": "share",
        "share": share,
        "share_by_the_run": _spread([row["perf/overhead_share"] for row in rows]),
        "step_s": _spread([row[STEP] for row in rows]),
        "phases_s": {name: _spread([row[name] for row in rows if name in row]) for name in phases},
    }


def work_s(row: Mapping[str, float]) -> float:
    """Seconds of a step in which samples were sampled and graded, or the trainer computed, or weights moved."""
    trained = sum(row[name] for name in row if name.startswith("perf/actor_") and name.endswith("_time"))
    return row["perf/rollout_time"] + trained + row["perf/phase_time/sync"]


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return Spread(tuple(values)).to_json()
