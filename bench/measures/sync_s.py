"""sync_s: seconds from asking the trainer for its weights until the engine generates with them.

The trainer and the engine are two processes, as in a real run, and the weights move through shared memory; Ray is left
out. Each turn first makes one optimizer step, so that there are new weights to carry. ``pause_to_resume`` is the part
during which the engine does not generate.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from bench.engine import running_engine
from bench.stats import Spread
from bench.training.vime_side import make_batch, make_worker
from bench.work import DEMO_FLAGS, TrainingWork, need_model
from vime.config import parse_config
from vime.serving.control import EngineControl
from vime.training.worker import TrainWorker
from vime.weights.sync import SyncReport, sync_engines

TURNS = 6  # after one that warms up: the first maps the memory and builds the engine's plan
STEP = TrainingWork(samples=8, prompt=24, response=8)


def measure(folder: Path) -> dict[str, Any]:
    need_model()
    sizes = ("--num-rollout", "1000", "--rollout-batch-size", "1", "--global-batch-size", "8")
    config = parse_config([*DEMO_FLAGS, *sizes])
    with running_engine(config, folder) as url:
        worker = make_worker(config)
        try:
            return asyncio.run(_measure(worker, url))
        finally:
            worker.stop()


async def _measure(worker: TrainWorker, url: str) -> dict[str, Any]:
    control = EngineControl(url)
    try:
        turns = [await _turn(worker, control, version) for version in range(1, TURNS + 2)]
    finally:
        await control.close()
    total = Spread(tuple(seconds for seconds, _, _ in turns[1:]))
    return {
        "value": total.to_json()["median"],
        "unit": "s",
        "total": total.to_json(),
        "pause_to_resume": Spread(tuple(report.paused_s for _, _, report in turns[1:])).to_json(),
        "export": Spread(tuple(export_s for _, export_s, _ in turns[1:])).to_json(),
        "first": round(turns[0][0], 3),
        "steps_of_the_last": {name: round(seconds, 4) for name, seconds in turns[-1][2].steps_s.items()},
    }


async def _turn(worker: TrainWorker, control: EngineControl, version: int) -> tuple[float, float, SyncReport]:
    """(seconds in total, of them for the export, what the sync says of itself)."""
    worker.train(make_batch(STEP))
    clock = asyncio.get_running_loop().time
    begin = clock()
    export = worker.export_weights()
    assert export is not None, "this process is the only rank"
    exported = clock()
    report = await sync_engines(export, [control], version)
    return clock() - begin, exported - begin, report
