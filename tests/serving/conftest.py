"""One real engine for each kind of model, started once a session, and a sender that stands in for the trainer."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import make_model
from vime.serving.client import RouterClient
from vime.serving.control import EngineControl
from vime.serving.engine import EngineServer, EngineSpec
from vime.serving.health import Progress
from vime.serving.router import RouterServer
from vime.types import Generation, SamplingParams
from vime.weights.plan import WeightPlan
from vime.weights.shm import SharedBuffer
from vime.weights.sync import SyncReport, sync_engines
from vime.weights.transfers import BUCKET_BYTES, SharedMemory

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9, 10]
TOLERANCE = 1e-4  # nats; two float32 implementations of the same model differ by about 1e-6

Weights = dict[str, torch.Tensor]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test is the first to need an engine waits for its start."""
    for item in items:
        starts = {"tied_engine", "untied_engine"} & set(getattr(item, "fixturenames", ()))
        if starts and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


@dataclass
class Served:
    """A running engine and the folder that it serves."""

    folder: Path
    server: EngineServer
    url: str

    @property
    def weights(self) -> Weights:
        """The original ones, by HF name."""
        return load_file(self.folder / "model.safetensors")


def serve(folder: Path, log_dir: Path, **spec: Any) -> Iterator[Served]:
    """A float32 engine; checks in the end that nothing of it is left."""
    server = EngineServer(EngineSpec(model=folder, dtype="float32", threads=1, **spec), log_dir=log_dir)
    url = server.start()
    tree = [process.pid for process in psutil.Process(server.pid).children(recursive=True)]
    try:
        yield Served(folder, server, url)
    finally:
        server.stop()
    assert len(tree) >= 2  # the API server and the engine core
    assert [pid for pid in tree if psutil.pid_exists(pid)] == []
    assert not is_listening(url)


def is_listening(url: str) -> bool:
    with socket.socket() as client:
        host, _, port = url.removeprefix("http://").partition(":")
        return client.connect_ex((host, int(port))) == 0


@pytest.fixture(scope="session")
def tied_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A Llama whose output layer is its embedding."""
    folder = tmp_path_factory.mktemp("tied")
    yield from serve(make_model(folder / "model", "llama", tied=True), folder)


def exported(model: Path, scratch: Path) -> Path:
    """The model after the way through Megatron's format and back, as users take it: vLLM must be able to load that."""
    from vime.training.convert import hf_to_torch_dist, torch_dist_to_hf  # what the two tools call

    megatron, back = scratch / "megatron", scratch / "exported"
    iteration = hf_to_torch_dist(["--hf-checkpoint", str(model), "--save", str(megatron)])
    torch_dist_to_hf(iteration, back, model)
    return back


@pytest.fixture(scope="session")
def untied_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A Qwen2, which has an output layer of its own, and biases in its attention; exported from Megatron's format, and
    served by two API servers."""
    folder = tmp_path_factory.mktemp("untied")
    model = exported(make_model(folder / "model", "qwen2", tied=False), folder)
    yield from serve(model, folder, flags={"api_server_count": 2})


@pytest.fixture
async def client(tied_engine: Served, control: EngineControl, tmp_path: Path) -> AsyncIterator[RouterClient]:
    """A client of a router in front of the tied engine."""
    router = RouterServer(log_dir=tmp_path)
    client = RouterClient(await router.start([tied_engine.url]), [control], request_timeout_s=120)
    yield client
    await client.close()
    router.stop()


@pytest.fixture
async def control(tied_engine: Served) -> AsyncIterator[EngineControl]:
    control = EngineControl(tied_engine.url, "engine 0")
    yield control
    await control.close()


class Sender:
    """Stands in for the trainer: packs weights and syncs them into one engine."""

    versions = itertools.count(1)

    def __init__(self, weights: Weights, control: EngineControl) -> None:
        self.plan = plan_of(weights)
        self.buffer = SharedBuffer(self.plan.total_bytes)
        self.control = control

    @property
    def path(self) -> str:
        return self.buffer.path

    async def send(
        self, weights: Weights, *, bucket_bytes: int = BUCKET_BYTES, asleep: bool = False
    ) -> tuple[int, SyncReport]:
        """Returns the version that the engine now serves."""
        version = next(self.versions)
        self.buffer.write(self.plan, weights.items())
        transfer = SharedMemory(self, bucket_bytes=bucket_bytes)
        return version, await sync_engines(transfer, [self.control], version, asleep=asleep)


@pytest.fixture
async def tied(tied_engine: Served, control: EngineControl) -> AsyncIterator[Sender]:
    """A sender to the tied engine, which has its original weights again afterwards, whatever became of it."""
    sender = Sender(tied_engine.weights, control)
    yield sender
    control.dead = None
    await sender.send(tied_engine.weights)


def plan_of(weights: Weights) -> WeightPlan:
    return WeightPlan.of((name, tensor.shape, str(tensor.dtype)) for name, tensor in weights.items())


def changed(weights: Weights, seed: int, scale: float = 0.3) -> Weights:
    """Other weights of the same shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + scale * tensor.float().std() * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in weights.items()
    }


def reference(
    folder: Path, weights: Weights, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """transformers' float32 log-prob of every response token: [T] nats. Without ``weights`` those of the folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if weights:
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


async def generate_on(engine: EngineControl, prompt: Sequence[int], params: SamplingParams = SAMPLED) -> Generation:
    """One generation past the router."""
    client = RouterClient(engine.url, [engine])
    try:
        return await client.generate(prompt, replace(params, seed=1), session_id="any")
    finally:
        await client.close()


async def generating(url: str, requests: int = 1) -> None:
    """Returns when so many requests have a token each. An API server of an engine knows of its own alone, and whoever
    asks cannot choose between them: each look is a connection of its own, and what each server said last counts."""
    running: dict[int, Mapping[str, int]] = {}
    async with asyncio.timeout(60):
        while sum(tokens > 0 for each in running.values() for tokens in each.values()) < requests:
            look = EngineControl(url)
            now = Progress.of(await look.progress())
            await look.close()
            running[now.server] = now.running


def largest_difference(generation: Generation, expected: torch.Tensor) -> float:
    return float((torch.tensor(generation.log_probs) - expected).abs().max())


async def assert_serves(served: Served, control: EngineControl, weights: Weights) -> None:
    generation = await generate_on(control, PROMPT)
    expected = reference(served.folder, weights, PROMPT, generation.token_ids)
    assert largest_difference(generation, expected) < TOLERANCE
