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
from bench.work import TrainingWork, demo_config, need_model
from vime.config import Config
from vime.serving.control import EngineControl
from vime.training.worker import TrainWorker
from vime.types import TrainBatch
from vime.weights.sync import SyncReport, sync_engines
from vime.weights.transfers import SharedMemory

TURNS = 6  # after one that warms up: the first maps the memory and builds the engine's plan
STEP = TrainingWork(samples=8, prompt=24, response=8)


def measure(folder: Path) -> dict[str, Any]:
    need_model()
    config = demo_config()
    with running_engine(config, folder) as url:
        worker = make_worker(config)
        try:
            return asyncio.run(_measure(worker, config, url))
        finally:
            worker.stop()


async def _measure(worker: TrainWorker, config: Config, url: str) -> dict[str, Any]:
    control = EngineControl(url)
    try:
        batch = make_batch(STEP, config)
        turns = [await _turn(worker, batch, control, version) for version in range(1, TURNS + 2)]
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


async def _turn(
    worker: TrainWorker, batch: TrainBatch, control: EngineControl, version: int
) -> tuple[float, float, SyncReport]:
    """(seconds in total, of them for the export, what the sync says of itself)."""
    worker.train(batch)
    clock = asyncio.get_running_loop().time
    begin = clock()
    export = worker.export_weights()
    assert export is not None, "this process is the only rank"
    exported = clock()
    report = await sync_engines(SharedMemory(export), [control], version)
    return clock() - begin, exported - begin, report
