"""A layer whose experts are computed together has the values and gradients of Megatron's loop over them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.test_fused_model import kernels
from tests.training.harness import batch_of, config_of, make_samples, on_ranks, started
from vime.platform import current
from vime.platform.sockets import free_port

pytest.importorskip("triton", reason="Triton is installed with torch for GPUs only")

ON_GPU = torch.cuda.is_available()
SLOW, TWO_GPUS = pytest.mark.slow, pytest.mark.two_gpus  # a CPU has as many ranks as one likes
DTYPES = {"fp32": (["--fp32"], torch.float32, 2e-6), "bf16": ([], torch.bfloat16, 2e-2)}


def with_kernels() -> AbstractContextManager[None]:
    """As on a GPU; on a CPU in Triton's interpreter."""
    return nullcontext() if ON_GPU else kernels(True)


def passed(
    model: Path,
    flags: list[str],
    dtype: torch.dtype,
    rank: int = 0,
    world_size: int = 1,
    port: int | None = None,
    *,
    adds: bool | None = None,
) -> dict[str, Tensor]:
    """Output and gradients of the last layer's experts and router, after two passes whose gradients add up.

    Args:
        adds: whether the kernel adds to Megatron's buffers, in place of what the configuration says.
    """
    from vime.training.layers.moe import Moe

    place: dict[str, Any] = {"rank": rank, "world_size": world_size, "port": port}
    with with_kernels(), started(config_of(model, *flags), **place) as worker:
        layer = [module for chunk in worker.chunks for module in chunk.modules() if isinstance(module, Moe)][-1]
        assert getattr(layer.experts, "grouped", False) is ("--no-moe-grouped-gemm" not in flags)
        if adds is not None:
            layer.experts.config.gradient_accumulation_fusion = adds
        for chunk in worker.chunks:
            chunk.zero_grad_buffer()
        torch.manual_seed(rank)
        device = current().device()
        for _ in range(2):
            hidden = torch.randn(19, 1, worker.shape.hidden_size, device=device, dtype=dtype, requires_grad=True)
            output, _ = layer(hidden)
            output.backward(torch.randn_like(output))
        assert hidden.grad is not None
        gradients = {name: each.main_grad.clone() for name, each in layer.named_parameters()}
        found = {"output": output.detach(), "hidden states": hidden.grad, **gradients}
        return {name: value.cpu() for name, value in found.items()}


def steps(model: Path, flags: list[str], rank: int, world_size: int, port: int) -> list[dict[str, float]]:
    """Metrics of two steps of training."""
    with with_kernels(), started(config_of(model, *flags), rank=rank, world_size=world_size, port=port) as worker:
        for _ in range(2):
            metrics = worker.train(batch_of(make_samples(4, seed=rank))).steps
        return [{name: value for name, value in each.items() if not name.startswith("perf/")} for each in metrics]


def trained_on_a_rank(rank: int, world_size: int, model: Path, flags: list[str], ports: list[int]) -> list[Any]:
    loop = ["--no-moe-grouped-gemm"]
    return [steps(model, [*flags, *more], rank, world_size, port) for more, port in zip(([], loop), ports, strict=True)]


def on_a_rank(rank: int, world_size: int, model: Path, flags: list[str], ports: list[int]) -> list[dict[str, Tensor]]:
    loop = ["--no-moe-grouped-gemm"]
    found = passed(model, flags, torch.float32, rank, world_size, ports[0])
    return [found, passed(model, [*flags, *loop], torch.float32, rank, world_size, ports[1])]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """By the norm of differences."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].double() - value.double()).norm() <= tolerance * value.double().norm(), name
    assert any(bool(value.any()) for name, value in expected.items() if "experts" in name)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize(
    "precision",
    ["fp32", pytest.param("bf16", marks=pytest.mark.skipif(not ON_GPU, reason="cuBLAS adds to fp32 on GPUs only"))],
)
def test_experts_together_are_experts_one_by_one(family: str, precision: str, model_of: Callable[..., Path]) -> None:
    flags, dtype, tolerance = DTYPES[precision]
    found = passed(model_of(family), flags, dtype)
    assert_same(found, passed(model_of(family), [*flags, "--no-moe-grouped-gemm"], dtype), tolerance)


def test_gradients_are_added_to_megatrons_buffers(model_of: Callable[..., Path]) -> None:
    """By the kernel, as it is with 16-bit weights on GPUs, or by Megatron, from gradients that the kernel wrote."""
    flags, dtype, _ = DTYPES["fp32"]
    found = passed(model_of("qwen3_moe"), flags, dtype, adds=True)
    assert_same(found, passed(model_of("qwen3_moe"), flags, dtype, adds=False), 1e-6)


WAYS = {
    "layers recomputed": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "experts recomputed": "--recompute-granularity selective --recompute-modules moe",
    "some frozen": r"--freeze-params-name-list local_experts\.[02]\..*fc1",
    "all frozen": "--freeze-params-name-list experts",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_training_is_that_of_experts_one_by_one(way: str, model_of: Callable[..., Path]) -> None:
    flags = ["--fp32", "--lr", "1e-3", *WAYS[way].split()]
    found, expected = trained_on_a_rank(0, 1, model_of("qwen3_moe"), flags, [free_port(), free_port()])
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


SPREAD = {
    "ep2": "--expert-model-parallel-size 2",
    "tp2 etp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "tp2 ep2": "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1",
}


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=TWO_GPUS if ON_GPU else () if each == "ep2" else SLOW) for each in SPREAD]
)
def test_spread_experts_together_are_experts_one_by_one(layout: str, model_of: Callable[..., Path]) -> None:
    flags = ["--fp32", "--actor-num-gpus-per-node", "2", *SPREAD[layout].split()]
    for found, expected in on_ranks(2, on_a_rank, model_of("qwen3_moe"), flags, [free_port(), free_port()]):
        assert_same(found, expected, DTYPES["fp32"][2])


OVERLAPPED = ["--actor-num-gpus-per-node", "2", "--use-distributed-optimizer", "--lr", "1e-3", "--overlap-grad-reduce"]
OVERLAPPED += ["--overlap-param-gather", "--ddp-bucket-size", "5000"]


@TWO_GPUS if ON_GPU else SLOW
def test_weights_are_gathered_and_gradients_reduced_during_the_passes(model_of: Callable[..., Path]) -> None:
    ports = [free_port(), free_port()]
    for found, expected in on_ranks(2, trained_on_a_rank, model_of("qwen3_moe"), ["--fp32", *OVERLAPPED], ports):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.two_gpus
@pytest.mark.skipif(not ON_GPU, reason="cuBLAS adds to fp32 on GPUs only")
def test_spread_experts_learn_in_16_bits(model_of: Callable[..., Path]) -> None:
    """Gradients are added by the kernel while those of other layers are reduced."""
    flags = [*OVERLAPPED, *SPREAD["ep2"].split()]
    ports = [free_port(), free_port()]
    for found, expected in on_ranks(2, trained_on_a_rank, model_of("qwen3_moe"), flags, ports):
        norms = [[step["train/grad_norm"] for step in steps] for steps in (found, expected)]
        assert norms[0] == pytest.approx(norms[1], rel=0.05)  # rounding may send a token elsewhere
