"""A trainer and engines, each in a process of its own, on one GPU or on two, and the ways of weights between them."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from bench.h200.sync import LocalTrainer
from tests.serving.conftest import generate_on, reference
from tests.tiny import make_model
from tests.training.harness import config_of, on_ranks, started
from vime.config import Config
from vime.serving.control import EngineControl
from vime.serving.engine import EngineServer
from vime.training.worker import TrainWorker
from vime.types import Generation, SamplingParams
from vime.weights.sync import sync_engines
from vime.weights.transfers import Broadcast, DeviceMemory, SharedMemory

ON_GPU = torch.cuda.device_count() > 0  # this process itself uses none
KINDS: dict[str, dict[str, Any]] = {
    "tied": {"family": "qwen3", "tied": True},
    "untied": {"family": "qwen3", "tied": False},
    "experts": {"family": "qwen3_moe", "tied": False, "moe_intermediate_size": 128},
}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}
KV_BYTES = (4 << 30) if ON_GPU else (64 << 20)
BUCKET_BYTES = 1 << 20
"""Each model has several of them."""
TIMEOUT_S = 30.0
DEADLINE_S = 120 if ON_GPU else 240
PROMPT = range(10, 42)
SAMPLED = SamplingParams(max_tokens=128, temperature=1.0, ignore_eos=True)


@dataclass(frozen=True, kw_only=True)
class Served:
    """An engine and what it was started for."""

    config: Config
    server: EngineServer

    @property
    def pids(self) -> set[int]:
        """Of all its processes."""
        return {process.pid for process in psutil.Process(self.server.pid).children(recursive=True)}


@asynccontextmanager
async def controlled(url: str) -> AsyncIterator[EngineControl]:
    control = EngineControl(url, "the engine")
    try:
        yield control
    finally:
        await control.close()


@contextmanager
def engines(scratch: Path, *, colocated: bool) -> Iterator[dict[str, Served]]:
    """One for each kind of model, all started at once: on the trainer's GPU, where they can sleep, or on the second."""
    found = {kind: _served(kind, scratch / kind, colocated=colocated) for kind in KINDS}
    try:
        with ThreadPoolExecutor(len(found)) as starting:
            list(starting.map(lambda each: each.server.start(), found.values()))
        yield found
    finally:
        for each in found.values():
            each.server.stop()


def _served(kind: str, scratch: Path, *, colocated: bool) -> Served:
    folder = make_model(scratch / "model", dtype="bfloat16", **SIZES, **KINDS[kind])
    flags = ["--vllm-kv-cache-memory-bytes", str(KV_BYTES), "--vllm-max-model-len", "256"]
    flags += ["--engine-start-timeout-s", "180" if ON_GPU else "300"]
    flags += ["--vllm-gpu-memory-utilization", "0.1", "--vllm-enforce-eager"] if ON_GPU else []
    config = config_of(folder, *flags, *(["--colocate"] if colocated else []))
    devices = ("0" if colocated else "1",) if ON_GPU else ()
    server = EngineServer.from_config(config, index=0, devices=devices, threads=1, log_dir=scratch)
    return Served(config=config, server=server)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What an engine sampled after a sync, against transformers in float32: mean differences, in nats a token."""

    versions: set[int]  # that the engine says its tokens have
    sent: float  # under the weights that were sent
    before: float  # under those before that change


def compare(served: dict[str, Served], ways: Sequence[str], scratch: Path) -> dict[str, list[Compared] | str]:
    """By kind of model and way of the weights: what two syncs brought, or the traceback of what went wrong.

    The trainer is in a process of its own: what breaks its CUDA context breaks nothing else.
    """
    known = {kind: (each.config, each.server.url) for kind, each in served.items()}
    (found,) = on_ranks(1, _compare, known, tuple(ways), scratch, deadline_s=DEADLINE_S)
    return found  # type: ignore[no-any-return]


def _compare(
    rank: int, world_size: int, known: dict[str, tuple[Config, str]], ways: Sequence[str], scratch: Path
) -> dict[str, list[Compared] | str]:
    found: dict[str, list[Compared] | str] = {}
    for kind, (config, url) in known.items():
        for way in ways:
            name = f"{kind} {way}"
            try:
                found[name] = _two_syncs(config, url, WAYS[way], scratch / name)
            except Exception:  # the others are tried all the same
                found[name] = traceback.format_exc()
            print(f"{name}: {found[name]}", flush=True)
    return found


def _two_syncs(config: Config, url: str, way: Way, scratch: Path) -> list[Compared]:
    with started(config) as worker:
        turns = asyncio.run(way(url, worker, scratch, versions=2))
    folders = [Path(config.checkpoint.hf_checkpoint), *(turn.folder for turn in turns)]
    return [
        Compared(
            versions=set(turn.generation.weight_versions),
            sent=turn.difference(turn.folder),
            before=turn.difference(before),
        )
        for before, turn in zip(folders, turns, strict=False)
    ]


def move(worker: TrainWorker, scale: float = 0.02) -> None:
    """Other weights, as after some training."""
    with torch.no_grad():
        for chunk in worker.chunks:
            for parameter in chunk.parameters():
                parameter.add_(torch.randn_like(parameter) * scale)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What an engine sampled after a sync, and the weights that it should have done it with."""

    folder: Path
    generation: Generation

    def difference(self, folder: Path) -> float:
        """From transformers' float32 log-probs under the weights in a folder: the mean, in nats a token."""
        expected = reference(folder, {}, PROMPT, self.generation.token_ids)
        return float((torch.tensor(self.generation.log_probs) - expected).abs().mean())


async def by_group(url: str, worker: TrainWorker, scratch: Path, versions: int) -> list[Turn]:
    """Changes the weights and sends them through a process group, as a run on separate devices does."""
    transfer = Broadcast(LocalTrainer(worker), bucket_bytes=BUCKET_BYTES)
    turns = []
    async with controlled(url) as control:
        for version in range(1, versions + 1):
            folder = _moved(worker, scratch / str(version))
            await sync_engines(transfer, [control], version, timeout_s=TIMEOUT_S)
            turns.append(Turn(folder=folder, generation=await generate_on(control, PROMPT, SAMPLED)))
    return turns


async def by_device(url: str, worker: TrainWorker, scratch: Path, versions: int) -> list[Turn]:
    """The same through memory of the device on which both take turns. The engine sleeps before and afterwards."""
    return await _in_turns(url, worker, scratch, versions, on_device=True)


async def by_host(url: str, worker: TrainWorker, scratch: Path, versions: int) -> list[Turn]:
    """The same through shared memory of the machine."""
    return await _in_turns(url, worker, scratch, versions, on_device=False)


async def _in_turns(url: str, worker: TrainWorker, scratch: Path, versions: int, *, on_device: bool) -> list[Turn]:
    turns = []
    async with controlled(url) as control:
        for version in range(1, versions + 1):
            folder = _moved(worker, scratch / str(version))
            export = worker.export_weights(version, on_device=on_device)
            assert export is not None, "this process is the only rank"
            assert bool(export.handles) is on_device, "there is room"
            transfer = DeviceMemory(export) if on_device else SharedMemory(export, bucket_bytes=BUCKET_BYTES)
            worker.offload("rest")
            worker.offload("parameters")
            await wake(control, "weights")
            await sync_engines(transfer, [control], version, timeout_s=TIMEOUT_S, asleep=ON_GPU)
            worker.drop_copy()
            await wake(control, "kv_cache")
            turns.append(Turn(folder=folder, generation=await generate_on(control, PROMPT, SAMPLED)))
            await sleep(control)
            worker.onload("parameters")
            worker.onload("rest")
    return turns


class Way(Protocol):
    async def __call__(self, url: str, worker: TrainWorker, scratch: Path, versions: int) -> list[Turn]:
        """Changes the weights so often, and brings them to the engine each time."""


WAYS: dict[str, Way] = {"device": by_device, "host": by_host, "group": by_group}


def _moved(worker: TrainWorker, folder: Path) -> Path:
    move(worker)
    worker.save_hf(folder)
    return folder


async def sleep(control: EngineControl) -> None:
    """Level 2; a CPU's engine has nowhere to go."""
    if ON_GPU:
        await control.sleep(2)


async def wake(control: EngineControl, tag: Any) -> None:
    if ON_GPU:
        await control.wake_up(tag)
