"""overhead_share: the share of a step of the demo that is none of generate, reward, train and sync.

A real run of the demo's script, a few steps long. The share is what the run itself writes to metrics.jsonl.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.stats import Spread
from bench.work import need_model

STEPS = 8
SCRIPT = "scripts/run-smollm2-135M-cpu.sh"
KEY = "perf/overhead_share"


def measure(folder: Path) -> dict[str, Any]:
    need_model()
    run = folder / "run"
    flags = ("--num-rollout", str(STEPS), "--skip-eval-before-train")
    subprocess.run(["bash", SCRIPT, *flags], check=True, stdout=sys.stderr, env={**os.environ, "RUN": str(run)})
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return summarize([row for row in rows if KEY in row])


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Spreads over the steps of a run. Raises RuntimeError when it made fewer than it should."""
    if len(rows) != STEPS:
        raise RuntimeError(f"metrics.jsonl has {len(rows)} rows with {KEY}, not {STEPS}")
    share = _spread(rows, KEY)
    phases = sorted(name for name in rows[0] if name.startswith("perf/phase_time/"))
    return {
        "value": share["median"],
        "unit": "share",
        "share": share,
        "step_s": _spread(rows, "perf/step_time"),
        "phases_s": {name.removeprefix("perf/phase_time/"): _spread(rows, name) for name in phases},
    }


def _spread(rows: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    return Spread(tuple(row[key] for row in rows if key in row)).to_json()
