"""The same step on one process and spread over two: the same loss, gradient norm and weights, in every layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.harness import batch_of, config_of, free_port, make_samples, make_step, on_ranks, started
from vime.training.weights_io import hf_weights
from vime.types import TrainBatch, TrainStep

FLAGS = ["--fp32", "--lr", "1e-2", "--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3"]
FLAGS += ["--entropy-coef", "0.01", "--normalize-advantages", "--num-steps-per-rollout", "2", "--clip-grad", "0.1"]
LAYOUTS: dict[str, dict[str, Any]] = {  # fields of config.parallel, set behind the rules of the command line
    "data": {},
    "data, distributed optimizer": {"use_distributed_optimizer": True},
    "tensor": {"tensor_model_parallel_size": 2},
    "tensor, sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    "pipeline, recomputed": {
        "pipeline_model_parallel_size": 2,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}

Outcome = tuple[tuple[dict[str, float], ...], dict[str, torch.Tensor]]


def whole_batch() -> TrainBatch:
    """Two steps of four samples, two micro-batches each."""
    samples = make_samples(masked=True)
    steps = [make_step(samples[:4], (0, 1), (2, 3)), make_step(samples[4:], (4, 5, 6), (7,))]
    return batch_of(samples, *steps)


def half_batch(rank: int) -> TrainBatch:
    """One of the two micro-batches of each step."""
    whole = whole_batch()
    steps = [
        TrainStep(micro_batches=(step.micro_batches[rank],), num_samples=step.num_samples, num_tokens=step.num_tokens)
        for step in whole.steps
    ]
    return batch_of(whole.samples, *steps)


def train_in_every_layout(rank: int, world_size: int, model: Path, ports: dict[str, int]) -> dict[str, Outcome]:
    found = {}
    base = config_of(model, *FLAGS, "--ref-load", str(model), "--actor-num-gpus-per-node", str(world_size))
    for name, fields in LAYOUTS.items():
        config = dataclasses.replace(base, parallel=dataclasses.replace(base.parallel, **fields))
        with started(config, rank=rank, world_size=world_size, port=ports[name]) as worker:
            batch = half_batch(rank) if worker.info.dp_size == 2 else whole_batch()  # type: ignore[attr-defined]
            metrics = worker.train(batch).steps
            weights = {name: weight.numpy().copy() for name, weight in hf_weights(worker.chunks, worker.shape)}
            found[name] = (metrics, weights)
    return found


@pytest.fixture(scope="module")
def model(model_of: Callable[..., Path]) -> Path:
    return model_of("qwen3", tied=True)


@pytest.fixture(scope="module")
def alone(model: Path) -> Outcome:
    with started(config_of(model, *FLAGS, "--ref-load", str(model))) as worker:
        metrics = worker.train(whole_batch()).steps
        weights = {name: weight.clone() for name, weight in hf_weights(worker.chunks, worker.shape)}
    return metrics, weights


@pytest.fixture(scope="module")
def spread(model: Path) -> list[dict[str, Outcome]]:
    ports = {name: free_port() for name in LAYOUTS}
    return on_ranks(2, train_in_every_layout, model, ports)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_take_the_step_of_one(layout: str, alone: Outcome, spread: list[dict[str, Outcome]]) -> None:
    metrics, weights = alone
    for found in (spread[0][layout][0], spread[1][layout][0]):
        for step, expected in zip(found, metrics, strict=True):
            comparable = {name: value for name, value in expected.items() if not name.startswith("perf/")}
            assert {name: step[name] for name in comparable} == pytest.approx(comparable, rel=2e-4, abs=2e-6)
    exported = spread[0][layout][1]
    assert list(exported) == list(weights)
    for name, weight in weights.items():
        # Adam makes a step of full size also of a gradient that is all rounding, so single elements may differ more.
        assert (torch.from_numpy(exported[name]) - weight).norm() < 1e-4 * weight.norm()
