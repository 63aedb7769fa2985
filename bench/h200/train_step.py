"""Training steps of the Qwen3-4B shape on one GPU, by vime's worker: seconds, MFU and peak memory.

    python -m bench.h200.train_step --recompute full --steps 4

A step is four micro-batches of about 16k packed tokens of mixed lengths, gradients clipped, AdamW with fp32 master weights. The time
is that of ``TrainWorker.train``: packing, advantages, passes, metrics, the update. MFU counts 6·N·T plus 6·layers·Σ len²·heads·width
operations (causal attention, forward and backward) against 989 TFLOP/s; recomputation is not counted.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

from bench.h200.model import QWEN3_4B, make_folder
from bench.training.vime_side import make_worker
from vime.config import Config, parse_config
from vime.types import TrainBatch, TrainSample, TrainStep

PEAK = 989e12
MICRO_BATCHES, TOKENS, PROMPT = 4, 16384, 256
RECOMPUTE = {
    "none": [],
    "full": ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"],
    "mlp": ["--recompute-granularity", "selective", "--recompute-modules", "mlp"],
}


def block(layers: int) -> list[str]:
    return ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", str(layers)]


def lengths(seed: int, tokens: int) -> list[int]:
    """Samples of 512 to 4,096 tokens that fill a micro-batch."""
    numbers, found = random.Random(seed), [0]
    while sum(found) < tokens:
        found.append(min(numbers.randint(512, 4096), tokens - sum(found)))
    return [length for length in found if length > PROMPT] or [tokens]


def make_batch(*, tokens: int = TOKENS, vocabulary: int = 151643) -> TrainBatch:
    numbers = random.Random(0)
    samples: list[TrainSample] = []
    micro_batches = []
    for seed in range(MICRO_BATCHES):
        first = len(samples)
        for length in lengths(seed, tokens):
            response = length - PROMPT
            samples.append(
                TrainSample(
                    index=len(samples),
                    group_index=len(samples),
                    tokens=tuple(numbers.randrange(vocabulary) for _ in range(length)),
                    response_length=response,
                    loss_mask=(1,) * response,
                    rollout_log_probs=(-12.0,) * response,
                    weight_versions=(),
                    raw_reward=1.0,
                    reward=numbers.choice((-1.0, 1.0)),
                )
            )
        micro_batches.append(tuple(range(first, len(samples))))
    step = TrainStep(
        micro_batches=tuple(micro_batches),
        num_samples=len(samples),
        num_tokens=sum(sample.response_length for sample in samples),
    )
    return TrainBatch(rollout_id=0, samples=tuple(samples), steps=(step,))


def operations(batch: TrainBatch, parameters: int) -> float:
    tokens = sum(sample.total_length for sample in batch.samples)
    squares = sum(sample.total_length**2 for sample in batch.samples)
    return 6.0 * parameters * tokens + 6.0 * 36 * squares * 32 * 128


def make_config(folder: Path, *flags: str, model: Mapping[str, object] = QWEN3_4B) -> Config:
    """A configuration for the model in the folder, which is made where it is not there yet."""
    if not (folder / "model.safetensors").is_file():
        make_folder(folder, dict(model))
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"input": "1 + 1", "label": "2"}\n')
    argv = ["--hf-checkpoint", str(folder), "--prompt-data", str(prompts), "--label-key", "label"]
    argv += ["--rm-type", "math", "--rollout-batch-size", "8", "--n-samples-per-prompt", "1", "--num-rollout", "100"]
    argv += ["--rollout-max-response-len", "4096", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"]
    argv += ["--lr", "1e-6", *flags]
    return parse_config(argv)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recompute", default="none", help="none, full, mlp, or a number of layers")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/qwen3-4b-random"))
    parser.add_argument("--profile", action="store_true")
    ours, rest = parser.parse_known_args()
    import torch

    recompute = RECOMPUTE.get(ours.recompute) if not ours.recompute.isdigit() else block(int(ours.recompute))
    assert recompute is not None, ours.recompute
    config = make_config(ours.folder, *recompute, *rest)
    begin = time.perf_counter()
    worker = make_worker(config)
    started = time.perf_counter() - begin
    batch = make_batch()
    parameters = sum(p.numel() for chunk in worker.chunks for p in chunk.parameters())
    torch.cuda.reset_peak_memory_stats()
    seconds, metrics = [], {}
    for index in range(ours.steps + 1):
        begin = time.perf_counter()
        result = worker.train(batch)
        torch.cuda.synchronize()
        if index:
            seconds.append(time.perf_counter() - begin)
        metrics = result.steps[-1]
    median = statistics.median(seconds)
    flops = operations(batch, parameters)
    tokens = sum(sample.total_length for sample in batch.samples)
    print(
        json.dumps(
            {
                "recompute": ours.recompute,
                "flags": rest,
                "seconds": [round(s, 4) for s in seconds],
                "tokens": tokens,
                "tokens_per_s": round(tokens / median),
                "mfu": round(flops / median / PEAK, 4),
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
                "start_s": round(started, 1),
                "phases": {k: round(v, 4) for k, v in result.seconds.items()},
                "loss": metrics["train/loss"],
                "grad_norm": metrics["train/grad_norm"],
                "entropy": metrics["train/entropy_loss"],
            }
        ),
        flush=True,
    )
    if ours.profile:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            worker.train(batch)
        print(trace.key_averages().table(sort_by="cuda_time_total", row_limit=28, max_name_column_width=70))
    worker.stop()


if __name__ == "__main__":
    main()
