"""A whole GRPO step of the Qwen3-4B shape against the bare training step of the same micro-batches, on one GPU.

    python -m bench.h200.grpo_step                # one H200: four minutes
    python -m bench.h200.grpo_step --tiny         # any machine: a model of two layers, to see that it runs

The work is that of ``train_step``. Both sides have the same model, optimizer and process, and take turns:

* ``bare``: what a training step cannot do without. Micro-batches that are packed beforehand, the mean log-prob of the
  response tokens as loss, no entropy, no advantages, no metrics of tokens; forward, backward, clipping, the update.
* ``grpo``: ``TrainWorker.train``. Packing and the way to the device, advantages, clipped ratios (the old log-probs are
  the current ones, as in every run with one step a rollout), entropy and all other metrics; no reference.

``overhead`` is what the medians differ by, as a share of the bare step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from bench.h200.model import QWEN3_4B
from bench.h200.rollout import machine
from bench.h200.sync import TINY
from bench.h200.train_step import RECOMPUTE, TOKENS, make_batch, make_config
from bench.training.vime_side import make_worker
from vime.algorithms.reduce import Reduction
from vime.platform import current
from vime.training.loss import Partial
from vime.training.model import answer_of, run
from vime.training.packing import MicroBatch
from vime.training.step import Learner
from vime.training.worker import TrainWorker
from vime.types import TrainBatch

TINY_TOKENS = 1024
FOLDER = Path("/tmp/qwen3-4b-random")


class MeanLogProb:
    """Implements ``step.Objective``: the least that one can train on."""

    per_token = False

    def forward(self, chunk: Any, batch: MicroBatch) -> Tensor:
        return run(chunk, batch, 1.0, entropy_gradient=False)

    def loss(self, output: Tensor, batch: MicroBatch, given: None, mean: Reduction) -> tuple[Tensor, Partial]:
        loss = -mean(answer_of(output).log_probs_t)
        return loss, Partial({"train/loss": loss.detach()}, {})


def bare_step(worker: TrainWorker, batch: TrainBatch) -> Callable[[], object]:
    (step,) = batch.steps
    ((*packs,),) = worker._packs(batch)
    learner: Learner[None] = Learner(
        chunks=worker.chunks, optimizer=worker.optimizer, scheduler=worker.scheduler, objective=MeanLogProb()
    )

    def take() -> None:
        for pack in packs:
            pack.segments.kept = None  # what full recomputation keeps belongs to one step
        learner.step([(pack, None) for pack in packs], step)

    return take


def seconds(step: Callable[[], object]) -> float:
    current().synchronize()
    begin = time.perf_counter()
    step()
    current().synchronize()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--recompute", choices=tuple(RECOMPUTE), default="none")
    parser.add_argument("--turns", type=int, default=6)
    ours, flags = parser.parse_known_args()
    model = TINY if ours.tiny else QWEN3_4B
    with tempfile.TemporaryDirectory(prefix="vime-grpo-") as scratch:
        folder = Path(scratch) if ours.tiny else FOLDER
        worker = make_worker(make_config(folder, *RECOMPUTE[ours.recompute], *flags, model=model))
        tokens = TINY_TOKENS if ours.tiny else TOKENS
        batch = make_batch(tokens=tokens, vocabulary=min(151643, int(str(model["vocab_size"]))))
        sides = {"bare": bare_step(worker, batch), "grpo": lambda: worker.train(batch)}
        for step in sides.values():  # kernels are compiled, memory is taken
            step()
        found: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(ours.turns):
            for name in sorted(sides, reverse=bool(turn % 2)):  # neither is always the first
                found[name].append(round(seconds(sides[name]), 4))
        worker.stop()
    medians = {name: statistics.median(each) for name, each in found.items()}
    overhead = round(medians["grpo"] / medians["bare"] - 1, 4)
    told = {"recompute": ours.recompute, "flags": flags, "seconds": found, "median_s": medians, "overhead": overhead}
    print(json.dumps({**machine(), **told}), flush=True)


if __name__ == "__main__":
    main()
