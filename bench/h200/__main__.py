"""Every measure of vime on one or two H200s, as a table and as one JSON object.

    python -m bench.h200 > bench/results/h200.json       # about 40 minutes on two GPUs
    python -m bench.h200 --only train,sync --folder logs

The table goes to stderr: what was measured, the target, the value, and whether it was reached. Each part is a module of
``bench.h200`` in a process of its own with a deadline; one that fails leaves its last words in its place. A part that
needs more GPUs than there are, or a model that is not there, is told as not measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.h200.rollout import machine
from bench.runner import adopt_orphans, run_command
from bench.work import MODEL, TASK

Result = Mapping[str, Any]
"""What a part printed, {"error": why it has no result}, or {"not_measured": why it was not tried}."""

LATER = slice(1, None)
"""All rollouts but the first, which warms up."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    what: str
    of: Callable[[Result], float]
    unit: str = ""  # behind numbers; "%" of a share
    at_least: float | None = None
    at_most: float | None = None
    most_of: Callable[[Result], float] | None = None  # where the result itself says what is reached at most

    def line(self, result: Result) -> dict[str, Any]:
        """what, target, measured, reached (None where there is no target or no value)."""
        told: dict[str, Any] = {"what": self.what, "target": self._target(None), "measured": None, "reached": None}
        if "not_measured" in result:
            return told | {"measured": f"not measured: {result['not_measured']}"}
        if "error" in result:
            return told | {"measured": "failed: " + str(result["error"]).splitlines()[0][:100]}
        try:
            value, most = self.of(result), self._most(result)
        except (KeyError, IndexError, TypeError, ValueError, statistics.StatisticsError) as error:
            return told | {"measured": f"not told by its result ({error!r})"}
        bounds = [value >= self.at_least] if self.at_least is not None else []
        bounds += [value <= most] if most is not None else []
        return told | {
            "target": self._target(most),
            "measured": self._number(value),
            "reached": all(bounds) if bounds else None,
        }

    def _most(self, result: Result) -> float | None:
        return self.at_most if self.most_of is None else self.most_of(result)

    def _target(self, most: float | None) -> str:
        most = self.at_most if most is None else most
        told = [f">= {self._number(self.at_least)}"] if self.at_least is not None else []
        return " ".join(told + ([f"<= {self._number(most)}"] if most is not None else []))

    def _number(self, value: float) -> str:
        scaled, unit = (100 * value, " %") if self.unit == "%" else (value, f" {self.unit}" if self.unit else "")
        return (f"{scaled:,.0f}" if abs(scaled) >= 1000 else f"{scaled:.4g}") + unit


@dataclass(frozen=True, kw_only=True)
class Part:
    """A module of ``bench.h200``, and what is told of its result."""

    words: tuple[str, ...]
    timeout_s: float
    rows: tuple[Row, ...]
    gpus: int = 1
    files: tuple[Path, ...] = ()  # without which there is nothing to measure

    def obstacle(self, gpus: int) -> str | None:
        """Why it cannot be measured here; None if it can."""
        missing = [path for path in self.files if not path.is_file()]
        if self.gpus > gpus:
            return f"it needs {self.gpus} GPU{'s'[: self.gpus - 1]}, there are {gpus}"
        return f"there is no {missing[0]}" if missing else None


def median_of_later(result: Result, list_name: str, key: str) -> float:
    return float(statistics.median(each[key] for each in result[list_name][LATER]))


def precision(name: str, key: str) -> Callable[[Result], float]:
    return lambda result: float(result["precisions"][name][key])


def of_step(name: str, key: str) -> Callable[[Result], float]:
    return lambda result: float(result["results"][name][key])


def ratio_to_offline(streams: str) -> Callable[[Result], float]:
    """Of the better one of our engines, those that answer with vLLM's own JSON left out."""
    return lambda r: max(v[streams] for name, v in r["ratio_to_offline"].items() if not name.endswith("_json"))


PARTS: Mapping[str, Part] = {
    "train": Part(
        words=("train_step", "--recompute", "none", "--steps", "3"),
        timeout_s=240,
        rows=(
            Row(what="training step, 4B, nothing recomputed: MFU", unit="%", at_least=0.5, of=lambda r: r["mfu"]),
            Row(what="  its peak memory", unit="GiB", of=lambda r: r["peak_gib"]),
        ),
    ),
    "train_full": Part(
        words=("train_step", "--recompute", "full", "--steps", "3"),
        timeout_s=240,
        rows=(
            Row(what="the same with full recomputation: MFU", unit="%", at_least=0.42, of=lambda r: r["mfu"]),
            Row(what="  its peak memory", unit="GiB", at_most=78, of=lambda r: r["peak_gib"]),
        ),
    ),
    "grpo_step": Part(
        words=("grpo_step",),
        timeout_s=240,
        rows=(
            Row(
                what="a whole GRPO step: longer than the bare training step by",
                unit="%",
                at_most=0.03,
                of=lambda r: r["overhead"],
            ),
        ),
    ),
    "moe": Part(
        words=("moe", "--only", "dense,grouped"),
        timeout_s=240,
        rows=(
            Row(what="layers of Qwen3-30B-A3B, one GPU: MFU", unit="%", of=of_step("grouped", "mfu")),
            Row(what="  tokens a second", of=of_step("grouped", "tokens_per_s")),
            Row(what="  a dense model with the same work a token: MFU", unit="%", of=of_step("dense", "mfu")),
            Row(what="  its tokens a second", of=of_step("dense", "tokens_per_s")),
        ),
    ),
    "moe_spread": Part(
        words=("moe", "--only", "grouped EP 2"),
        timeout_s=240,
        gpus=2,
        rows=(
            Row(what="the same, experts spread over two GPUs: MFU", unit="%", of=of_step("grouped, EP 2", "mfu")),
            Row(what="  tokens a second of both", of=of_step("grouped, EP 2", "tokens_per_s")),
        ),
    ),
    "loss_memory": Part(
        words=("loss_memory",),
        timeout_s=120,
        rows=(
            Row(
                what="log-probs, loss and backward of 16k tokens: memory above the hidden states",
                unit="GiB",
                at_most=2,
                of=lambda r: r["added_gib"],
            ),
        ),
    ),
    "difference": Part(
        words=("difference",),
        timeout_s=240,
        files=(MODEL / "model.safetensors", TASK / "train.jsonl"),
        rows=(
            Row(
                what="log-prob difference of trainer and engine, SmolLM2, bf16 (1.3 x floor at most)",
                unit="nats",
                of=precision("bf16", "trainer_engine"),
                most_of=lambda r: 1.3 * r["precisions"]["bf16"]["floor"],
            ),
            Row(what="  the same, fp16", unit="nats", at_most=0.008, of=precision("fp16", "trainer_engine")),
        ),
    ),
    "offload": Part(
        words=("offload",),
        timeout_s=240,
        rows=(
            Row(
                what="trainer's state to the host",
                unit="GB/s",
                at_least=45,
                of=lambda r: median_of_later(r, "turns", "out_gb_per_s"),
            ),
            Row(
                what="  and back",
                unit="GB/s",
                at_least=45,
                of=lambda r: median_of_later(r, "turns", "back_gb_per_s"),
            ),
        ),
    ),
    "rollout": Part(
        words=("rollout",),
        timeout_s=660,
        rows=(
            Row(what="sampling over HTTP / offline vLLM, 256 streams", at_least=0.92, of=ratio_to_offline("256")),
            Row(what="  the same, 512 streams", at_least=0.92, of=ratio_to_offline("512")),
        ),
    ),
    "colocated": Part(
        words=("colocated", "--rollouts", "3", "--vllm-kv-cache-memory-bytes", "50000000000"),
        timeout_s=660,
        rows=(
            Row(
                what="colocated step, 4B: share outside generation, log-probs, training",
                unit="%",
                at_most=0.05,
                of=lambda r: median_of_later(r, "rollouts", "share_outside"),
            ),
            Row(
                what="  its weight sync, sleep to keys and values awake",
                unit="s",
                at_most=0.6,
                of=lambda r: median_of_later(r, "rollouts", "update_weights_time"),
            ),
        ),
    ),
    "separate": Part(
        words=("colocated", "--separate", "--rollouts", "4"),
        timeout_s=660,
        gpus=2,
        rows=(
            Row(
                what="weights from GPU to GPU in the loop, 4B, pause to resume",
                unit="s",
                at_most=0.3,
                of=lambda r: median_of_later(r, "rollouts", "pause_to_resume"),
            ),
        ),
    ),
    "sync": Part(
        words=("sync",),
        timeout_s=300,
        gpus=2,
        rows=(
            Row(
                what="  the same without a loop around",
                unit="s",
                at_most=0.3,
                of=lambda r: median_of_later(r, "turns", "pause_to_resume_s"),
            ),
            Row(what="  the bytes alone, at the bandwidth of a copy", unit="s", of=lambda r: r["floor_s"]),
        ),
    ),
    "layouts": Part(
        words=("layouts",),
        timeout_s=420,
        gpus=2,
        rows=(
            Row(
                what="layouts over NCCL further from one process than allowed",
                at_most=0,
                of=lambda r: sum(bool(each["exceeded"]) for each in r["results"].values()),
            ),
        ),
    ),
}


def lines(results: Mapping[str, Result]) -> list[dict[str, Any]]:
    """The table: of each row what, target, measured, reached."""
    return [row.line(result) for name, result in results.items() for row in PARTS[name].rows]


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The same for a person to read."""
    said = {True: "reached", False: "NOT reached", None: ""}
    return [f"{row['what']:82} {row['target']:16} {row['measured']:16} {said[row['reached']]}".rstrip() for row in rows]


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
    adopt_orphans()
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="vime-h200-") as temporary:
        folder = given.folder or Path(temporary)
        for name in names:
            begin = time.monotonic()
            results[name] = measured(name, gpus, folder)
            if "not_measured" not in results[name]:  # should a later one never end, this one is known
                told = f"{name}: {time.monotonic() - begin:.0f} s {json.dumps(results[name])}"
                print(told, file=sys.stderr, flush=True)
    rows = lines(results)
    print("\n".join(table(rows)), file=sys.stderr)
    head = {"command": " ".join(["python", "-m", "bench.h200", *sys.argv[1:]]), **machine()}
    print(json.dumps(head | {"table": rows, "results": results}, indent=1))
    return int(any("error" in result for result in results.values()))


def measured(name: str, gpus: int, folder: Path) -> Result:
    part = PARTS[name]
    obstacle = part.obstacle(gpus)
    if obstacle is not None:
        return {"not_measured": obstacle}
    module, *words = part.words
    return run_command([sys.executable, "-m", f"bench.h200.{module}", *words], folder / f"{name}.log", part.timeout_s)


if __name__ == "__main__":
    sys.exit(main())
