"""Training steps of Qwen3-30B-A3B's layers on one and two H200s, beside a dense model that does the same work a token.

    python -m bench.h200.moe                  # one GPU, and with two GPUs also expert-parallel: 3 minutes
    python -m bench.h200.moe --micro          # the products and permutations of experts alone, for several tiles
    python -m bench.h200.moe --tiny           # any machine: two small layers, to see that it runs

A step is that of ``bench.h200.train_step``: four micro-batches of about 16k packed tokens of mixed lengths on each GPU,
gradients clipped, AdamW with fp32 master weights, nothing recomputed; weights are random, and so are routes.
MFU is (6·N·T + 6·layers·Σ len²·heads·width) ÷ seconds ÷ GPUs ÷ 989 TFLOP/s, where N counts what a token is multiplied
by: all parameters but the input embedding and the experts that it is not sent to. The dense model has an MLP of 8 · 768
channels: as many parameters a token. "sequential" is ``--no-moe-grouped-gemm``, Megatron's loop over experts.

Every part runs in a process of its own with a deadline; one that fails leaves its last words in its place. The table
goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.h200.model import QWEN3_4B, SMALL, describe_model
from bench.h200.moe_micro import micro, micro_table
from bench.h200.rollout import machine
from bench.h200.train_step import PEAK, TOKENS, make_batch
from bench.runner import adopt_orphans, run_command
from vime.config import Config, parse_config
from vime.platform.sockets import free_port
from vime.types import TrainBatch

DENSE = QWEN3_4B | {
    "hidden_size": 2048,
    "intermediate_size": 8 * 768,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A model that is trained."""

    model: Mapping[str, object]
    layers: int = 8  # with 128 experts: 101 GB of weights, gradients and optimizer state
    gpus: int = 1
    flags: tuple[str, ...] = ()
    timeout_s: float = 120


SEQUENTIAL = ("--no-moe-grouped-gemm",)
SPREAD = ("--expert-model-parallel-size", "2", "--use-distributed-optimizer")
PARTS: Mapping[str, Part] = {
    "dense": Part(model=DENSE),
    "grouped": Part(model=QWEN3_30B_A3B),
    "sequential": Part(model=QWEN3_30B_A3B, flags=SEQUENTIAL),
    "grouped, EP 2": Part(model=QWEN3_30B_A3B, layers=12, gpus=2, flags=SPREAD),
    "sequential, EP 2": Part(model=QWEN3_30B_A3B, layers=12, gpus=2, flags=(*SPREAD, *SEQUENTIAL)),
}
KINDS: Mapping[str, str] = {
    "experts' products": r"^_product|^_weight_gradient",
    "experts' activation": r"_activate_weighted",
    "attention": r"flash|_attention|fmha|_split|_join|rotat|_qkv",
    "permutation": r"_copy_rows|_add_rows|_place|index|scatter|gather|[sS]ort|[sS]can|CatArray|masked|topk|TopK",
    "communication": r"nccl",
    "other products": r"nvjet|gemm|cutlass|xmma|cublas",
    "optimizer": r"[aA]dam|multi_tensor|foreach",
}
"""By the names of kernels. A loop over experts multiplies by cuBLAS, whose products cannot be told from the others."""


def train(part: Part, rank: int, port: int, tiny: bool) -> dict[str, Any]:
    """Seconds and memory of training steps on one rank."""
    import torch

    from vime.training.worker import TrainWorker

    class RandomWorker(TrainWorker):
        """Weights are made in place, the same on every rank but for experts, which are other ones on each."""

        def _load_start(self, resume: Any) -> None:
            for chunk in self.chunks:
                for name, parameter in chunk.named_parameters():
                    torch.manual_seed(zlib.crc32(name.encode()) + (rank if ".experts." in name else 0))
                    parameter.data.normal_(std=0.02) if parameter.dim() > 1 else parameter.data.fill_(1)

    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(Path(folder), part, tiny)
        worker = RandomWorker(config, rank=rank, world_size=part.gpus, master_addr="127.0.0.1", master_port=port)
        worker.start()
    start_s = time.perf_counter() - begin
    batch = make_batch(tokens=1024 if tiny else TOKENS)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        result = worker.train(batch)
        seconds.append(time.perf_counter() - begin)
    busiest = load_of_experts(worker, batch)
    found = {
        "start_s": round(start_s, 1),
        "first_step_s": round(seconds[0], 2),
        "seconds": [round(each, 4) for each in seconds[1:]],
        **rates(part, batch, statistics.median(seconds[1:]), tiny),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if torch.cuda.is_available() else None,
        "busiest_expert_over_mean": busiest,
        "loss": result.steps[-1]["train/loss"],
        "grad_norm": result.steps[-1]["train/grad_norm"],
        **profiled(lambda: worker.train(batch)),
    }
    worker.stop()
    return found


def make_config(folder: Path, part: Part, tiny: bool) -> Config:
    describe_model(folder, model_of(part, tiny))
    (folder / "prompts.jsonl").write_text('{"input": "1 + 1", "label": "2"}\n')
    argv = ["--hf-checkpoint", str(folder), "--prompt-data", str(folder / "prompts.jsonl"), "--label-key", "label"]
    argv += ["--rm-type", "math", "--rollout-batch-size", "8", "--n-samples-per-prompt", "1", "--num-rollout", "100"]
    argv += ["--rollout-max-response-len", "4096", "--actor-num-gpus-per-node", str(part.gpus), "--lr", "1e-6"]
    return parse_config([*argv, "--rollout-num-gpus", "1", *part.flags])


def model_of(part: Part, tiny: bool) -> dict[str, object]:
    model = {**part.model, "num_hidden_layers": part.layers} | (SMALL if tiny else {})
    return model | ({"moe_intermediate_size": 16} if tiny and "num_experts" in model else {})


def rates(part: Part, batch: TrainBatch, seconds: float, tiny: bool) -> dict[str, Any]:
    """By the formula above."""
    shape: dict[str, Any] = model_of(part, tiny)
    hidden, width = shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
    of_attention = hidden * (2 * width + 2 * shape["num_key_value_heads"] * shape["head_dim"])
    if "num_experts" in shape:
        channels = shape["num_experts_per_tok"] * shape["moe_intermediate_size"]
        of_router = hidden * shape["num_experts"]
    else:
        channels, of_router = shape["intermediate_size"], 0
    of_layer = of_attention + of_router + 3 * hidden * channels
    active = shape["num_hidden_layers"] * of_layer + hidden * shape["vocab_size"]
    tokens = sum(sample.total_length for sample in batch.samples)
    squares = sum(sample.total_length**2 for sample in batch.samples)
    operations = 6.0 * active * tokens + 6.0 * shape["num_hidden_layers"] * squares * width
    return {
        "layers": shape["num_hidden_layers"],
        "active_parameters": active,
        "tokens_per_s": round(part.gpus * tokens / seconds),
        "mfu": round(operations / seconds / PEAK, 4),
    }


def load_of_experts(worker: Any, batch: TrainBatch) -> list[float]:
    """Of each layer: the most tokens of an expert on this rank over their mean, in another step."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    seen: dict[int, float] = {}

    def note(module: Any, inputs: Any) -> None:
        counts = inputs[1].float()
        seen[id(module)] = round(float(counts.max() / counts.mean()), 2)

    layers = [module for chunk in worker.chunks for module in chunk.modules() if isinstance(module, SequentialMLP)]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    if layers:
        worker.train(batch)
    for hook in hooks:
        hook.remove()
    return list(seen.values())


def profiled(step: Callable[[], Any]) -> dict[str, Any]:
    """Seconds of kernels by kind in one more step, and the longest kernels."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    kernels = {event.key: event.self_device_time_total / 1e6 for event in trace.key_averages()}
    by_kind = dict.fromkeys([*KINDS, "rest"], 0.0)
    for name, seconds in kernels.items():
        by_kind[next((kind for kind, words in KINDS.items() if re.search(words, name)), "rest")] += seconds
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:20]
    return {
        "kernel_s": {kind: round(seconds, 4) for kind, seconds in by_kind.items()},
        "longest_kernels": {name[:80]: round(seconds, 4) for name, seconds in longest},
    }


def _rank(rank: int, name: str, port: int, tiny: bool, folder: str) -> None:
    (Path(folder) / str(rank)).write_text(json.dumps(train(PARTS[name], rank, port, tiny)))


def one_part(name: str, tiny: bool) -> dict[str, Any]:
    """Rank 0's result of a part."""
    if PARTS[name].gpus == 1:
        return train(PARTS[name], 0, free_port(), tiny)
    import torch

    with tempfile.TemporaryDirectory() as folder:
        arguments = (name, free_port(), tiny, folder)
        torch.multiprocessing.start_processes(_rank, arguments, nprocs=PARTS[name].gpus, start_method="spawn")
        result: dict[str, Any] = json.loads((Path(folder) / "0").read_text())
        return result


def table(results: Mapping[str, Any]) -> list[str]:
    lines = [f"{'':18} {'layers':>6} {'tokens/s':>9} {'MFU':>7} {'step s':>7} {'GiB':>6}  seconds of kernels"]
    for name, result in results.items():
        if "error" in result:
            lines.append(f"{name:18} failed: {' | '.join(str(result['error']).splitlines()[-3:])[-400:]}")
            continue
        parts = "  ".join(f"{kind} {seconds:.3f}" for kind, seconds in result.get("kernel_s", {}).items())
        step = statistics.median(result["seconds"])
        lines.append(
            f"{name:18} {result['layers']:6} {result['tokens_per_s']:9} {100 * result['mfu']:6.1f}% {step:7.3f} "
            f"{result['peak_gib'] or 0:6.1f}  {parts}"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default=",".join(p.replace(", ", " ") for p in PARTS), help="comma-separated parts")
    parser.add_argument("--folder", type=Path, help="where logs stay; a temporary folder otherwise")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        output = os.dup(1)
        os.dup2(2, 1)  # whatever libraries print goes to the log
        found = micro() if given.part == "micro" else one_part(given.part, given.tiny)
        os.write(output, json.dumps(found).encode() + b"\n")
        return 0
    import torch

    gpus = 2 if given.tiny else torch.cuda.device_count()
    chosen = [name for name in PARTS if name.replace(", ", " ") in given.only.split(",")]
    names = ["micro"] if given.micro else [name for name in chosen if PARTS[name].gpus <= gpus]
    adopt_orphans()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="vime-moe-") as temporary:
        for name in names:
            command = [sys.executable, "-m", "bench.h200.moe", "--part", name, *(["--tiny"] if given.tiny else [])]
            log = (given.folder or Path(temporary)) / f"{name.replace(', ', '-')}.log"
            begin = time.monotonic()
            results[name] = run_command(command, log, 170 if name == "micro" else PARTS[name].timeout_s)
            told = f"{name}: {time.monotonic() - begin:.0f} s {json.dumps(results[name])}"
            print(told, file=sys.stderr, flush=True)  # should a later one never end
    if given.micro and "error" not in results["micro"]:
        print("\n".join(micro_table(results["micro"])), file=sys.stderr)
    else:
        print("\n".join(table(results)), file=sys.stderr)
    print(json.dumps({"command": "python -m bench.h200.moe", **machine(), "results": results}, indent=1))
    return int(any("error" in result for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
