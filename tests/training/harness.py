"""What the training tests share: small configurations, samples that are a function of a seed, and worker processes."""

from __future__ import annotations

import pickle
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from vime.config import Config, parse_config
from vime.config.roles import critic_config
from vime.platform.sockets import free_port
from vime.training.critic import CriticWorker
from vime.training.model_worker import ModelWorker
from vime.training.sft import SftWorker
from vime.training.worker import TrainWorker
from vime.types import CHILD_STRIDE, TrainBatch, TrainSample, TrainStep

DEADLINE_S = 240

W = TypeVar("W", bound=ModelWorker[Any])


def config_of(model: Path, *flags: str) -> Config:
    """A configuration for one model folder; ``flags`` come last and win."""
    prompts = model.parent / "prompts.jsonl"
    prompts.write_text('{"input": "1 + 1", "label": "2"}\n')
    argv = ["--hf-checkpoint", str(model), "--prompt-data", str(prompts), "--label-key", "label", "--rm-type", "math"]
    argv += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "8"]
    argv += ["--num-rollout", "4", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"]
    return parse_config([*argv, *flags])


def make_samples(
    count: int = 8, *, seed: int = 0, vocab_size: int = 512, masked: bool = False
) -> tuple[TrainSample, ...]:
    """Samples of different lengths, two to a prompt; ``masked`` takes every third response token out."""
    rng = random.Random(seed)
    prompts = [_tokens(rng, rng.randint(3, 12), vocab_size) for _ in range((count + 1) // 2)]
    return tuple(_sample(rng, i, prompts[i // 2], vocab_size, masked) for i in range(count))


def make_children(drawn: int = 4) -> tuple[TrainSample, ...]:
    """Samples that one generate call made of each of those that were drawn, by turns 3, 1, 2 and 1. The second of all
    has nothing to train."""
    places = [(parent, child) for parent in range(drawn) for child in range((3, 1, 2, 1)[parent % 4])]
    samples = [
        replace(sample, index=parent + child * CHILD_STRIDE, parent_index=parent, group_index=parent // 2)
        for sample, (parent, child) in zip(make_samples(len(places), masked=True), places, strict=True)
    ]
    samples[1] = replace(samples[1], loss_mask=(0,) * samples[1].response_length)
    return tuple(samples)


def _tokens(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocab_size) for _ in range(count))


def _sample(rng: random.Random, index: int, prompt: tuple[int, ...], vocab_size: int, masked: bool) -> TrainSample:
    response = rng.randint(1, 9)
    tokens = prompt + _tokens(rng, response, vocab_size)
    return TrainSample(
        index=index,
        group_index=index // 2,
        tokens=tokens,
        response_length=response,
        loss_mask=tuple(int(not masked or t % 3 != 1) for t in range(response)),
        rollout_log_probs=tuple(rng.uniform(-7, -5) for _ in range(response)),
        weight_versions=(0,) * response,
        raw_reward=float(index % 2),
        reward=rng.uniform(-1.5, 1.5),
    )


def make_step(samples: Sequence[TrainSample], *micro_batches: Sequence[int]) -> TrainStep:
    """A step of these samples, all in one micro-batch unless told otherwise."""
    chosen = micro_batches or (range(len(samples)),)
    return TrainStep(
        micro_batches=tuple(tuple(indices) for indices in chosen),
        num_samples=len(samples),
        num_tokens=sum(max(sample.trained_tokens, 1) for sample in samples),
    )


def batch_of(samples: Sequence[TrainSample], *steps: TrainStep, rollout_id: int = 0) -> TrainBatch:
    return TrainBatch(rollout_id=rollout_id, samples=tuple(samples), steps=steps or (make_step(samples),))


@contextmanager
def started(config: Config, *, rank: int = 0, world_size: int = 1, port: int | None = None) -> Iterator[TrainWorker]:
    """A worker in this process, stopped at the end whatever happens."""
    with _started(TrainWorker, config, rank, world_size, port) as worker:
        yield worker


@contextmanager
def started_critic(
    config: Config, *, rank: int = 0, world_size: int = 1, port: int | None = None
) -> Iterator[CriticWorker]:
    """The same for a critic."""
    with _started(CriticWorker, critic_config(config), rank, world_size, port) as worker:
        yield worker


@contextmanager
def started_sft(config: Config, *, rank: int = 0, world_size: int = 1, port: int | None = None) -> Iterator[SftWorker]:
    """The same for fine-tuning on given dialogues."""
    with _started(SftWorker, config, rank, world_size, port) as worker:
        yield worker


@contextmanager
def _started(kind: type[W], config: Config, rank: int, world_size: int, port: int | None) -> Iterator[W]:
    worker = kind(config, rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=port or free_port())
    try:
        worker.info = worker.start()  # type: ignore[attr-defined]
        yield worker
    finally:
        worker.stop()


def on_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, deadline_s: float = DEADLINE_S
) -> list[Any]:
    """``function(rank, world_size, *arguments)`` in as many processes; what each returned, by rank.

    The first failure of a rank is raised here with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = torch.multiprocessing.start_processes(
            _in_process, (world_size, function, arguments, folder), nprocs=world_size, join=False, start_method="spawn"
        )
        end = time.monotonic() + deadline_s
        try:
            while not ranks.join(timeout=1):
                assert time.monotonic() < end, f"the ranks did not finish within {deadline_s:g} s"
        finally:
            for process in ranks.processes:
                process.kill()
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]


def _in_process(rank: int, world_size: int, function: Callable[..., Any], arguments: Any, folder: str) -> None:
    torch.set_num_threads(1)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(function(rank, world_size, *arguments)))
