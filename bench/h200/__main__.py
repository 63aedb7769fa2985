"""Every measure of vime on one or two H200s, as a table and as one JSON object.

    python -m bench.h200 > bench/results/h200.json       # about 25 minutes on two GPUs
    python -m bench.h200 --only train,sync --folder logs

The table goes to stderr. Each part is a module of ``bench.h200`` in a process of its own with a deadline; one that
fails leaves its last words in its place. Parts that need two GPUs are left out, and named, where there is one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.h200.rollout import machine
from bench.runner import adopt_orphans, run_command

Result = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    what: str
    target: str
    of: Callable[[Result], object]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A module of ``bench.h200``, and what is told of its result."""

    words: tuple[str, ...]
    timeout_s: float
    rows: tuple[Row, ...]
    gpus: int = 1


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def sync_of(result: Result) -> str:
    later = [turn["pause_to_resume_s"] for turn in result["turns"][1:]]
    return f"{statistics.median(later):.3f} s (floor {result['floor_s']:.3f} s)"


def later_rollouts(result: Result, key: str) -> float:
    """The median over all rollouts but the first, which warms up."""
    return statistics.median(rollout[key] for rollout in result["rollouts"][1:])


PARTS: Mapping[str, Part] = {
    "train": Part(
        words=("train_step", "--recompute", "none", "--steps", "3"),
        timeout_s=240,
        rows=(
            Row(what="training step, 4B, nothing recomputed: MFU", target=">= 50 %", of=lambda r: percent(r["mfu"])),
            Row(what="its peak memory", target="", of=lambda r: f"{r['peak_gib']} GiB"),
        ),
    ),
    "train_full": Part(
        words=("train_step", "--recompute", "full", "--steps", "3"),
        timeout_s=240,
        rows=(
            Row(what="the same with full recomputation: MFU", target=">= 42 %", of=lambda r: percent(r["mfu"])),
            Row(what="its peak memory", target="<= 78 GiB", of=lambda r: f"{r['peak_gib']} GiB"),
        ),
    ),
    "offload": Part(
        words=("offload",),
        timeout_s=240,
        rows=(
            Row(
                what="trainer's state to the host and back",
                target=">= 45 GB/s",
                of=lambda r: json.dumps(r["turns"][-1]),
            ),
        ),
    ),
    "rollout": Part(
        words=("rollout",),
        timeout_s=660,
        rows=(
            Row(
                what="sampling over HTTP / offline vLLM, by streams",
                target=">= 0.92",
                of=lambda r: json.dumps(r["ratio_to_offline"]),
            ),
        ),
    ),
    "colocated": Part(
        words=("colocated", "--rollouts", "4"),
        timeout_s=660,
        rows=(
            Row(
                what="colocated step, 4B: share outside generation, log-probs, training",
                target="<= 5 %",
                of=lambda r: percent(later_rollouts(r, "share_outside")),
            ),
            Row(
                what="its weight sync",
                target="<= 0.6 s",
                of=lambda r: f"{later_rollouts(r, 'update_weights_time'):.3f} s",
            ),
        ),
    ),
    "sync": Part(
        words=("sync",),
        timeout_s=300,
        gpus=2,
        rows=(Row(what="weights from GPU to GPU, 4B, pause to resume", target="<= 0.3 s", of=sync_of),),
    ),
    "layouts": Part(
        words=("layouts",),
        timeout_s=420,
        gpus=2,
        rows=(
            Row(
                what="layouts over NCCL further from one process than allowed",
                target="0",
                of=lambda r: f"{sum(bool(v['exceeded']) for v in r['results'].values())} of {len(r['results'])}",
            ),
        ),
    ),
}


def table(results: Mapping[str, Result]) -> list[str]:
    """Measure, target, value; of every part that ran."""
    return [
        f"{row.what:72} {row.target:12} {_told(row, result)}"
        for name, result in results.items()
        for row in PARTS[name].rows
    ]


def _told(row: Row, result: Result) -> object:
    if "error" in result:
        return "failed: " + str(result["error"]).splitlines()[0][:100]
    try:
        return row.of(result)
    except (KeyError, IndexError, TypeError, statistics.StatisticsError) as error:
        return f"not told by its result ({error!r})"


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument("--folder", type=Path, help="where logs stay; a temporary folder otherwise")
    given = parser.parse_args()
    names = given.only.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"--only {unknown[0]}: there are {', '.join(PARTS)}")
    gpus = torch.cuda.device_count()
    left_out = [name for name in names if PARTS[name].gpus > gpus]
    if left_out:
        print(f"left out, {gpus} GPUs are too few: {', '.join(left_out)}", file=sys.stderr)
    adopt_orphans()
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="vime-h200-") as temporary:
        folder = given.folder or Path(temporary)
        for name in (name for name in names if name not in left_out):
            module, *words = PARTS[name].words
            command = [sys.executable, "-m", f"bench.h200.{module}", *words]
            begin = time.monotonic()
            results[name] = run_command(command, folder / f"{name}.log", PARTS[name].timeout_s)
            print(f"{name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    print("\n".join(table(results)), file=sys.stderr)
    print(
        json.dumps({"command": "python -m bench.h200", **machine(), "left_out": left_out, "results": results}, indent=1)
    )
    return int(any("error" in result for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
