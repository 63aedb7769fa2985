"""Whole GRPO steps of the Qwen3-4B shape where trainer and engine take turns on one GPU: what is neither generation,
log-probs nor training.

    python -m bench.h200.colocated --rollouts 3             # one H200
    python -m bench.h200.colocated --separate --rollouts 4  # two: the engine has a GPU of its own
    python -m bench.h200.colocated --tiny --rollouts 2      # any machine: a model of two layers, to see that it runs

``python train.py --colocate`` runs in a process of its own, each rollout 32 prompts of 256 tokens with 8 answers of
1,024 tokens; further flags of vime may follow. Printed is a JSON object: of each rollout the seconds of its phases,
the share of the step outside generation, log-probs and training, the seconds from pause to resume of its weight sync,
and of all how long the start took. It is printed anew after each rollout, with all of them so far: the last one counts,
and a run that is cut has told what it knew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.h200.model import QWEN3_4B, make_folder
from bench.h200.sync import TINY
from vime.types import Sample

PROMPTS, ANSWERS, PROMPT, RESPONSE = 32, 8, 256, 1024
POLL_S, GRACE_S = 1.0, 60.0
RUNNING = "still running"
STEPS = ("pause", "start", "load", "finish", "reset", "resume")
WORK = ("phase_time/generate", "actor_train_time", "actor_log_probs_time", "actor_ref_log_probs_time")


async def parity(args: Any, sample: Sample) -> float:
    """1 for an even first token: random weights get it right half of the time, so that groups differ."""
    return float(sample.tokens[-sample.response_length] % 2 == 0)


def command(folder: Path, run: Path, *, tiny: bool, separate: bool, rollouts: int) -> list[str]:
    prompts, prompt, response = (4, 16, 32) if tiny else (PROMPTS, PROMPT, RESPONSE)
    rows = [{"text": " ".join(f"w{i}" for _ in range(prompt))} for i in range(prompts)]
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    eager = ["--vllm-enforce-eager"] if tiny else ["--vllm-compilation-config", json.dumps(GRAPHS)]
    memory = [] if tiny else ["--vllm-gpu-memory-utilization", "0.5", *RECOMPUTE]
    place = ["--rollout-num-gpus", "1"] if separate else ["--colocate"]
    return [
        *(sys.executable, "train.py", "--actor-num-gpus-per-node", "1", *place),
        *("--hf-checkpoint", str(folder), "--save", str(run), "--no-save-optim"),
        *("--prompt-data", str(data), "--input-key", "text", "--custom-rm-path", "bench.h200.colocated:parity"),
        *("--rollout-batch-size", str(prompts), "--n-samples-per-prompt", str(ANSWERS), "--num-rollout", str(rollouts)),
        *("--rollout-max-response-len", str(response), "--vllm-max-model-len", str(prompt + response + 8)),
        *("--vllm-max-num-seqs", str(prompts * ANSWERS), "--lr", "1e-6"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "16384"),
        *eager,
        *memory,
    ]


GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [8, 64, 128, 192, 256]}
"""No compilation by torch, which makes the start a minute longer; graphs of the sizes that a wave passes through."""
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]


def describe(line: dict[str, float]) -> dict[str, float]:
    """Of one rollout: what it took, and the share outside of what a step is for."""
    perf = {name.removeprefix("perf/"): value for name, value in line.items() if name.startswith("perf/")}
    times = {name: round(value, 4) for name, value in perf.items() if "_time" in name}
    work = sum(perf.get(name, 0.0) for name in WORK)
    paused = sum(perf.get(f"sync_time/{step}", 0.0) for step in STEPS)
    return times | {"share_outside": round(1 - work / perf["step_time"], 4), "pause_to_resume": round(paused, 4)}


def rollouts_of(run: Path) -> list[dict[str, float]]:
    """Those that are over; the last line of the metrics may still be being written."""
    metrics = run / "metrics.jsonl"
    whole = metrics.read_text().rpartition("\n")[0] if metrics.is_file() else ""
    return [describe(line) for line in map(json.loads, whole.splitlines()) if "perf/step_time" in line]


def follow(child: subprocess.Popen[bytes], run: Path, timeout_s: float, tell: Callable[[], None]) -> int | str:
    """Waits for the end of a run, and tells of each rollout; what became of it. Ends it when its time is over."""
    end, told = time.monotonic() + timeout_s, 0
    while time.monotonic() < end:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(POLL_S)
        if len(rollouts_of(run)) > told:
            told = len(rollouts_of(run))
            tell()
    child.terminate()
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    return f"ended after {timeout_s:g} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--separate", action="store_true", help="trainer and engine on a GPU each")
    parser.add_argument("--rollouts", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=540.0, help="seconds for all")
    ours, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="vime-colocated-") as scratch:
        folder = Path(scratch, "model") if ours.tiny else Path("/tmp/qwen3-4b-random")
        if not (folder / "model.safetensors").is_file():
            make_folder(folder, dict(TINY if ours.tiny else QWEN3_4B))
        run = Path(scratch, "run")
        words = [*command(folder, run, tiny=ours.tiny, separate=ours.separate, rollouts=ours.rollouts), *flags]
        log, begin = Path(scratch, "out"), time.monotonic()

        def tell(status: int | str) -> None:
            found = {"status": status, "all_s": round(time.monotonic() - begin, 1), "rollouts": rollouts_of(run)}
            print(json.dumps(found | last_words(status), indent=1), flush=True)

        def last_words(status: int | str) -> dict[str, str]:
            if status in (0, RUNNING):
                return {}
            engine = run / "logs" / "engine_0.log"
            return {
                "output": log.read_text(errors="replace")[-3000:],
                "engine": engine.read_text(errors="replace")[-1500:] if engine.is_file() else "",
            }

        with log.open("wb") as output:
            child = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=dict(os.environ))
            tell(follow(child, run, ours.timeout, lambda: tell(RUNNING)))


if __name__ == "__main__":
    main()
