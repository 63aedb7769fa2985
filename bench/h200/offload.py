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

FOLDER = Path("/tmp/qwen3-4b-random")
TURNS = 3


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return round(time.perf_counter() - begin, 3)


def used_gib() -> float:
    """Of the device, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return round((total - free) / 2**30, 1)


def main() -> None:
    worker = make_worker(make_config(FOLDER, *RECOMPUTE["full"]))
    worker.train(make_batch())  # moments exist from the first step on
    found: dict[str, Any] = {"used_gib": used_gib(), "turns": []}
    for _ in range(TURNS):
        out = {part: seconds(lambda part=part: worker.offload(part)) for part in ("rest", "parameters")}
        away = used_gib()
        back = {part: seconds(lambda part=part: worker.onload(part)) for part in ("parameters", "rest")}
        found["turns"].append({"out_s": out, "back_s": back, "used_away_gib": away})
    found["export_s"] = [seconds(worker.export_weights) for _ in range(TURNS + 1)]
    print(json.dumps(found))
    worker.stop()


if __name__ == "__main__":
    main()
