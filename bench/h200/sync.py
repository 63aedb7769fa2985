"""Weights from a trainer on one GPU to an engine on another: seconds from pause to resume, and what they could be.

    python -m bench.h200.sync                   # two GPUs, the Qwen3-4B shape
    python -m bench.h200.sync --device cpu      # the same steps with a tiny model, gloo instead of NCCL

Flags of vime may follow (``--update-weight-buffer-size 268435456``, ``--no-vllm-enforce-eager``). The trainer is vime's
worker with Megatron's model and optimizer in this process; the engine is a real server with our transfer engine. Each
turn changes the trainer's weights first. Printed, as JSON:

* ``before``, ``after``: mean difference of log-probs between engine and trainer, in nats a token; before the first sync
  the engine has other weights than the trainer, so that this says something.
* ``turns``: pause to resume, its steps, and the trainer's part (gather, checksums, broadcast).
* ``loaded``: the same while requests run; each of them goes on afterwards, with both versions in order.
* ``floor_s``: the bytes of the weights over the bandwidth that copies between the two devices were seen to have.
* ``killed``: the engine is killed in the middle of a sync; how long the trainer needs to notice, and whether it works.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.h200.model import QWEN3_4B, SMALL, make_folder
from bench.h200.train_step import make_config
from bench.training.vime_side import make_worker
from vime.serving.client import parse_generation, request_body
from vime.serving.control import EngineControl
from vime.serving.engine import EngineServer
from vime.training.worker import TrainWorker
from vime.types import SamplingParams
from vime.weights.invitation import Invitation, SendReport
from vime.weights.plan import WeightPlan
from vime.weights.probe import probe
from vime.weights.sync import SyncError, SyncReport, sync_engines
from vime.weights.transfers import Broadcast

TINY = (
    QWEN3_4B
    | SMALL
    | {
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,  # so small a model would only repeat its input
    }
)
TOLERANCE = 0.5  # nats a token, on average; rounding of random bf16 weights gives 0.09 to 0.14
LOGITS_STD = 4.0  # sharper than what random weights give, so that wrong weights would be far off
STUCK_S = 120.0
REQUESTS, TOKENS = 32, 400


class LocalTrainer:
    """Implements ``transfers.Broadcaster``: a rank of this process, in a thread of its own."""

    def __init__(self, worker: TrainWorker) -> None:
        self.worker = worker
        self.thread = ThreadPoolExecutor(1)
        self.report: SendReport | None = None
        self.meanwhile: Callable[[], None] = lambda: None

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *arguments)

    async def weight_plan(self, version: int) -> WeightPlan:
        return self.worker.weight_plan(version)

    async def invite_engines(self, members: int, timeout_s: float) -> Invitation:
        return await self.call(self.worker.invite_engines, "127.0.0.1", members, timeout_s)

    async def join_engines(self) -> None:
        await self.call(self.worker.join_engines)

    async def broadcast_weights(self, bucket_bytes: int) -> SendReport:
        self.meanwhile()
        self.report = await self.call(self.worker.broadcast_weights, bucket_bytes)
        assert self.report is not None, "this process is the only rank"
        return self.report

    async def log_probs_of(self, token_ids: list[int], prompt_length: int) -> list[float]:
        return await self.call(self.worker.log_probs_of, token_ids, prompt_length)


class Bench:
    """One trainer, one engine."""

    def __init__(self, worker: TrainWorker, server: EngineServer, bucket_bytes: int, prompt: list[int]) -> None:
        self.trainer, self.server, self.prompt = LocalTrainer(worker), server, prompt
        self.control = EngineControl(server.url, "the engine")
        self.transfer = Broadcast(self.trainer, bucket_bytes=bucket_bytes)
        self.version = 0

    async def difference(self, tolerance: float = TOLERANCE) -> float:
        """Mean of the log-probs' differences, in nats a token. Raises ProbeFailed above ``tolerance``."""
        report = await probe([self.control], self.trainer.log_probs_of, self.prompt, tolerance=tolerance)
        return round(report.mean_difference, 4)

    async def turn(self) -> dict[str, Any]:
        """New weights, and a sync."""
        change(self.trainer.worker)
        self.version += 1
        report: SyncReport = await sync_engines(self.transfer, [self.control], self.version, timeout_s=STUCK_S)
        sent = self.trainer.report
        assert sent is not None
        steps = {name: round(seconds, 4) for name, seconds in report.steps_s.items()}
        return {
            "pause_to_resume_s": round(report.paused_s, 4),
            "announce_s": round(report.announced_s, 4),
            "steps_s": steps,
            "send_s": round(sent.seconds, 4),
            "send_gb_per_s": round(sent.sent_bytes / sent.seconds / 1e9, 1),
        }

    async def loaded(self) -> dict[str, Any]:
        """A sync while requests run."""
        params = SamplingParams(max_tokens=TOKENS, temperature=1.0, ignore_eos=True)
        running = [
            asyncio.ensure_future(self.control.generate(request_body(self.prompt, params), timeout_s=STUCK_S))
            for _ in range(REQUESTS)
        ]
        await asyncio.sleep(0.8)
        before = self.version
        found = await self.turn()
        answers = [parse_generation(answer) for answer in await asyncio.gather(*running)]
        versions = [list(answer.weight_versions) for answer in answers]
        assert all(len(each) == TOKENS and each == sorted(each) for each in versions), "a request was cut short"
        return found | {
            "requests": len(answers),
            "with_both_versions": sum({before, self.version} == set(each) for each in versions),
        }

    async def killed(self) -> dict[str, Any]:
        """The engine dies while it receives."""
        tree = psutil.Process(self.server.pid).children(recursive=True)

        def kill() -> None:
            for process in tree:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)

        sent = self.trainer.report
        assert sent is not None
        self.trainer.meanwhile = lambda: threading.Timer(sent.seconds / 4, kill).start()
        begin = time.perf_counter()
        try:
            await self.turn()
            outcome = "the sync was over before the engine died"
        except SyncError as error:
            outcome = str(error)[:300]
        seconds = round(time.perf_counter() - begin, 2)
        log_probs = await self.trainer.log_probs_of([*self.prompt, 5, 6], len(self.prompt))
        return {"noticed_after_s": seconds, "error": outcome, "the trainer goes on": len(log_probs) == 2}


def change(worker: TrainWorker) -> None:
    with torch.no_grad():
        for chunk in worker.chunks:
            for parameter in chunk.parameters():
                if parameter.dim() > 1:
                    parameter.add_(torch.randn_like(parameter) * 0.004)


def sharpen(worker: TrainWorker, hidden_size: int) -> None:
    """Scales the last norm so that logits have the standard deviation ``LOGITS_STD`` instead of that of random ones."""
    with torch.no_grad():
        for chunk in worker.chunks:
            for name, parameter in chunk.named_parameters():
                if name.endswith("final_layernorm.weight"):
                    parameter.mul_(LOGITS_STD / (0.02 * hidden_size**0.5))


def copy_bandwidth(device: str) -> float:
    """Bytes a second from one device to the other, the best of ten copies of half a GiB."""
    data = torch.empty(1 << 29, dtype=torch.uint8, device="cuda:0" if device == "cuda" else "cpu")
    other = torch.empty_like(data, device="cuda:1" if device == "cuda" else "cpu")
    best = float("inf")
    for _ in range(10):
        begin = time.perf_counter()
        other.copy_(data)
        if device == "cuda":
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)
        best = min(best, time.perf_counter() - begin)
    return len(data) / best


async def measure(bench: Bench, turns: int, device: str) -> None:
    found: dict[str, Any] = {"before": await bench.difference(tolerance=float("inf"))}
    found["turns"] = [await bench.turn() for _ in range(turns)]
    found["after"] = await bench.difference()
    found["loaded"] = await bench.loaded()
    found["after_loaded"] = await bench.difference()
    total = bench.trainer.worker.weight_plan().total_bytes
    bandwidth = copy_bandwidth(device)
    found |= {"bytes": total, "copy_gb_per_s": round(bandwidth / 1e9, 1), "floor_s": round(total / bandwidth, 4)}
    print(json.dumps(found, indent=1), flush=True)
    stuck = threading.Timer(STUCK_S, lambda: (print("the trainer hangs on a dead engine", flush=True), os._exit(3)))
    stuck.start()
    print(json.dumps({"killed": await bench.killed()}), flush=True)
    stuck.cancel()
    await bench.control.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--turns", type=int, default=6)
    ours, rest = parser.parse_known_args()
    on_gpu = ours.device == "cuda"
    model = QWEN3_4B if on_gpu else TINY
    with tempfile.TemporaryDirectory(prefix="vime-sync-") as scratch:
        folder = Path("/tmp/qwen3-4b-random") if on_gpu else Path(scratch, "tiny")
        if not (folder / "model.safetensors").is_file():
            make_folder(folder, dict(model))
        flags = ["--vllm-max-model-len", "2048", "--vllm-enforce-eager"]
        flags += ["--vllm-gpu-memory-utilization", "0.6"] if on_gpu else []
        config = make_config(folder, *flags, *rest)
        devices = ("1",) if on_gpu else ()
        server = EngineServer.from_config(config, index=0, devices=devices, threads=1, log_dir=Path(scratch))
        numbers = random.Random(0)
        prompt = [numbers.randrange(100, int(str(model["vocab_size"]))) for _ in range(64)]
        try:
            with ThreadPoolExecutor(1) as starting:  # the engine's start takes longer than the trainer's
                started = starting.submit(server.start)
                worker = make_worker(config)
                sharpen(worker, int(str(model["hidden_size"])))
                started.result()
            asyncio.run(
                measure(Bench(worker, server, config.engine.update_weight_buffer_size, prompt), ours.turns, ours.device)
            )
            worker.stop()
        finally:
            server.stop()


if __name__ == "__main__":
    main()
