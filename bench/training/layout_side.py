"""GRPO steps of a small random model, shared by as many processes as a layout wants. One step a request.

    python -m bench.training.layout_side MODEL FLAGS          the first rank; it starts the others
    python -m bench.training.layout_side MODEL FLAGS --rank R --port P

All ranks together use all cores. The others learn of a request from the first one, and sleep until then.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bench.protocol import SideChannel
from bench.training.vime_side import make_samples
from bench.work import TASK, TrainingWork
from vime.cluster.job import split
from vime.config import Config, parse_config
from vime.platform.sockets import free_port
from vime.training.worker import TrainWorker
from vime.types import RolloutBatch


def make_config(model: str, flags: Sequence[str]) -> Config:
    argv = ["--hf-checkpoint", model, "--prompt-data", str(TASK / "train.jsonl"), "--input-key", "prompt"]
    argv += ["--label-key", "label", "--rm-type", "math", "--rollout-num-gpus", "1", "--num-rollout", "1000"]
    argv += ["--rollout-batch-size", "16", "--n-samples-per-prompt", "1", "--rollout-max-response-len", "64"]
    argv += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "512", "--lr", "1e-5", *flags]
    return parse_config(argv)


def serve(config: Config, rank: int, port: int, channel: SideChannel | None) -> None:
    world = config.cluster.train_world_size
    torch.set_num_threads(max((os.cpu_count() or 1) // world, 1))
    worker = TrainWorker(config, rank=rank, world_size=world, master_addr="127.0.0.1", master_port=port)
    info = worker.start()
    if channel is not None:
        channel.reply(ready=True)
    for request in _everywhere(channel):
        work = TrainingWork.from_json(request)
        batch = RolloutBatch(rollout_id=0, samples=make_samples(work))
        share = split(batch, info.dp_size, config)[info.dp_rank]
        dist.barrier()
        begin = time.perf_counter()
        result = worker.train(share)
        if channel is not None:
            channel.reply(seconds=time.perf_counter() - begin, grad_norm=result.steps[0]["train/grad_norm"])
    worker.stop()


def _everywhere(channel: SideChannel | None) -> Iterator[dict[str, Any]]:
    """The requests of the first rank, on every rank."""
    requests = None if channel is None else channel.requests()
    while True:
        message = [None if requests is None else next(requests, None)]
        dist.broadcast_object_list(message, src=0)
        if message[0] is None:
            return
        yield message[0]


def main(model: str, *words: str) -> None:
    others = words[-4] == "--rank" if len(words) >= 4 else False
    flags = words[:-4] if others else words
    config = make_config(model, flags)
    if others:
        serve(config, int(words[-3]), int(words[-1]), None)
        return
    channel = SideChannel()
    port = free_port()
    command = [sys.executable, "-m", "bench.training.layout_side", model, *flags]
    ranks = range(1, config.cluster.train_world_size)
    children = [
        subprocess.Popen([*command, "--rank", str(rank), "--port", str(port)], stdin=subprocess.DEVNULL)
        for rank in ranks
    ]
    try:
        serve(config, 0, port, channel)
    finally:
        for child in children:
            child.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
