"""How fast the trainer of the Qwen3-4B shape leaves one GPU and comes back, and writes its weights for the engines.

python -m bench.h200.offload
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.h200.train_step import RECOMPUTE, make_batch, make_config
from bench.training.vime_side import make_worker
from vime.training.offload import optimizer_tensors
from vime.training.worker import TrainWorker

FOLDER = Path("/tmp/qwen3-4b-random")
TURNS = 3


def seconds(worker: TrainWorker, call: Callable[[], Any]) -> float:
    """Until all copies are complete, also those that others would run beside."""
    begin = time.perf_counter()
    call()
    worker._offloader.arrive()
    torch.cuda.synchronize()
    return round(time.perf_counter() - begin, 3)


def moved_bytes(worker: TrainWorker) -> int:
    """Parameters, main weights and moments; gradients are dropped."""
    parameters = sum(p.nbytes for chunk in worker.chunks for p in chunk.parameters())
    return parameters + sum(tensor.nbytes for tensor in optimizer_tensors(worker.optimizer))


def used_gib() -> float:
    """Of the device, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return round((total - free) / 2**30, 1)


def main() -> None:
    worker = make_worker(make_config(FOLDER, *RECOMPUTE["full"]))
    worker.train(make_batch())  # moments exist from the first step on
    size = moved_bytes(worker)
    found: dict[str, Any] = {"used_gib": used_gib(), "moved_gb": round(size / 1e9, 1), "turns": []}
    for _ in range(TURNS):
        out = {part: seconds(worker, lambda part=part: worker.offload(part)) for part in ("rest", "parameters")}
        away = used_gib()
        back = {part: seconds(worker, lambda part=part: worker.onload(part)) for part in ("parameters", "rest")}
        speed = {f"{way}_gb_per_s": round(size / sum(s.values()) / 1e9, 1) for way, s in (("out", out), ("back", back))}
        found["turns"].append({"out_s": out, "back_s": back, "used_away_gib": away, **speed})
    found["export_s"] = [seconds(worker, worker.export_weights) for _ in range(TURNS + 1)]
    print(json.dumps(found))
    worker.stop()


if __name__ == "__main__":
    main()
