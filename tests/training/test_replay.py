"""Routes of experts, recorded where the old log-probs are computed and followed where the policy learns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.tiny import make_model
from tests.training.harness import batch_of, config_of, make_samples, make_step, started
from vime.training.layers.moe import Router
from vime.training.model import run
from vime.training.packing import MicroBatch, Packer
from vime.types import TrainBatch

FLAGS = ["--fp32", "--lr", "1e-2", "--num-steps-per-rollout", "2"]
FULL = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
SELECTIVE = ["--recompute-granularity", "selective", "--recompute-modules", "moe"]
EXPERTS, CHOSEN, LAYER = 8, 2, 2  # Megatron counts layers from 1; the first one is dense


@pytest.fixture(scope="module")
def model(model_of: Callable[..., Path]) -> Path:
    return model_of("qwen3_moe")


def two_steps() -> TrainBatch:
    samples = make_samples()
    return batch_of(samples, make_step(samples[:4], (0, 1), (2, 3)), make_step(samples[4:], (4, 5, 6), (7,)))


@contextmanager
def seen_packs() -> Iterator[list[MicroBatch]]:
    """The micro-batches that are packed in the block."""
    packs: list[MicroBatch] = []
    pack = Packer.pack

    def keep(self: Packer, *args: Any) -> MicroBatch:
        packs.append(pack(self, *args))
        return packs[-1]

    with mock.patch.object(Packer, "pack", keep):
        yield packs


def train(model: Path, *flags: str) -> tuple[list[dict[str, float]], list[Tensor]]:
    """The metrics of two steps, and the routes of each micro-batch."""
    with seen_packs() as packs, started(config_of(model, *FLAGS, *flags)) as worker:
        metrics = worker.train(two_steps()).steps
    routes = [pack.segments.routes.experts[LAYER] for pack in packs if pack.segments.routes is not None]
    return [comparable(step) for step in metrics], routes


def comparable(step: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in step.items() if not name.startswith("perf/")}


@pytest.mark.parametrize("recompute", [[], FULL, SELECTIVE], ids=["kept", "full recompute", "selective recompute"])
def test_replayed_routes_are_those_that_the_router_would_choose(model: Path, recompute: list[str]) -> None:
    """In the first step the weights are those of the log-prob pass; on one process so is the arithmetic."""
    free, nothing = train(model)
    replayed, routes = train(model, "--use-routing-replay", *recompute)
    assert replayed[0] == pytest.approx(free[0], rel=1e-6)
    assert nothing == []
    assert [len(each) for each in routes] == [len(pack) for pack in routes]
    assert len(routes) == 4
    assert all(each.shape[1] == CHOSEN and each.min() >= 0 and each.max() < EXPERTS for each in routes)


@pytest.mark.parametrize("recompute", [[], FULL, SELECTIVE], ids=["kept", "full recompute", "selective recompute"])
def test_flipped_routes_are_followed(model: Path, recompute: list[str]) -> None:
    """Every token goes to the experts that were not recorded: loss and gradient are others, however recomputed."""
    from vime.training import worker as worker_module

    straight, _ = train(model, "--use-routing-replay")
    recorded = worker_module.recorded

    @contextmanager
    def flipped(packs: list[MicroBatch]) -> Iterator[None]:
        with recorded(packs):
            yield
        for pack in packs:
            assert pack.segments.routes is not None
            experts = pack.segments.routes.experts
            experts[LAYER] = (experts[LAYER] + EXPERTS // 2) % EXPERTS

    with mock.patch.object(worker_module, "recorded", flipped):
        other, _ = train(model, "--use-routing-replay", *recompute)
        kept, _ = train(model, "--use-routing-replay")
    assert abs(other[0]["train/loss"] - straight[0]["train/loss"]) > 1e-3
    assert abs(other[0]["train/grad_norm"] - straight[0]["train/grad_norm"]) > 1e-3
    assert other[0] == pytest.approx(kept[0], rel=1e-6)  # the pass that is differentiated and its repetition agree
    assert other[1] == pytest.approx(kept[1], rel=1e-4)


def test_the_reference_leaves_no_routes(model: Path, tmp_path: Path) -> None:
    reference = make_model(tmp_path / "reference", "qwen3_moe", seed=1)
    with_reference = ["--use-kl-loss", "--ref-load", str(reference), "--load", str(model)]
    _, alone = train(model, "--use-routing-replay")
    _, beside = train(model, "--use-routing-replay", *with_reference)
    assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))


def test_the_old_policy_is_the_one_that_is_trained_also_with_one_step(model: Path) -> None:
    samples = make_samples()
    with seen_packs() as packs, started(config_of(model, "--fp32", "--use-routing-replay")) as worker:
        (metrics,) = worker.train(batch_of(samples)).steps
    assert all(pack.segments.routes is not None for pack in packs)
    assert metrics["train/ppo_kl"] == pytest.approx(0, abs=1e-7)


def test_what_fills_a_pack_counts_for_no_expert(model_of: Callable[..., Path]) -> None:
    """The bias that balances experts goes by the tokens that each got."""
    samples = make_samples(4)
    with started(config_of(model_of("glm4_moe"), "--fp32")) as worker:
        pack = replace(worker._packer, multiple=64).pack(samples)
        for chunk in worker.chunks:
            run(chunk, pack, 1.0)
        routers = [module for chunk in worker.chunks for module in chunk.modules() if isinstance(module, Router)]
    assert pack.segments.filling is not None
    tokens = len(pack.tokens_l) - int(pack.segments.filling.sum())
    assert routers
    assert {float(router.local_tokens_per_expert.sum()) for router in routers} == {float(tokens * CHOSEN)}
