"""A layer whose experts are computed together has the values and gradients of Megatron's loop over them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.gpu.test_fused_model import kernels
from tests.training.harness import config_of, started
from vime.platform import current

pytest.importorskip("triton", reason="Triton is installed with torch for GPUs only")

ON_GPU = torch.cuda.is_available()
DTYPES = {"fp32": (["--fp32"], torch.float32, 2e-6), "bf16": ([], torch.bfloat16, 2e-2)}


def with_kernels() -> AbstractContextManager[None]:
    """As on a GPU; on a CPU in Triton's interpreter."""
    return nullcontext() if ON_GPU else kernels(True)


def passed(model: Path, flags: list[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of the last layer's experts and router, after two passes whose gradients add up."""
    from vime.training.layers.moe import Moe

    with with_kernels(), started(config_of(model, *flags)) as worker:
        layer = [module for chunk in worker.chunks for module in chunk.modules() if isinstance(module, Moe)][-1]
        assert getattr(layer.experts, "grouped", False) is ("--no-moe-grouped-gemm" not in flags)
        for chunk in worker.chunks:
            chunk.zero_grad_buffer()
        torch.manual_seed(0)
        device = current().device()
        for _ in range(2):
            hidden = torch.randn(19, 1, worker.shape.hidden_size, device=device, dtype=dtype, requires_grad=True)
            output, _ = layer(hidden)
            output.backward(torch.randn_like(output))
        assert hidden.grad is not None
        gradients = {name: each.main_grad.clone() for name, each in layer.named_parameters()}
        return {"output": output.detach(), "hidden states": hidden.grad, **gradients}


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize(
    "precision",
    ["fp32", pytest.param("bf16", marks=pytest.mark.skipif(not ON_GPU, reason="cuBLAS adds to fp32 on GPUs only"))],
)
def test_experts_together_are_experts_one_by_one(family: str, precision: str, model_of: Callable[..., Path]) -> None:
    flags, dtype, tolerance = DTYPES[precision]
    found = passed(model_of(family), flags, dtype)
    expected = passed(model_of(family), [*flags, "--no-moe-grouped-gemm"], dtype)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].double() - value.double()).norm() <= tolerance * value.double().norm(), name
    assert any(bool(value.any()) for name, value in expected.items() if "experts" in name)
