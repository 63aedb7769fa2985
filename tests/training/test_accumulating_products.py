"""Gradients that are added to Megatron's buffers by the product itself, where what is kept for them is packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from vime.platform import current
from vime.platform.megatron_wgrad import use_accumulating_products
from vime.training.layers.lean import cheap, lean


class OnAnyDevice:
    """The products in plain arithmetic: cuBLAS's cannot be had on a CPU."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, gradients: Tensor, total: Tensor) -> None:
        total += gradients.t().float() @ inputs.float()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fused_weight_gradient_mlp_cuda", "_grad_accum_fusion_available"):
        monkeypatch.setattr(layers, name, getattr(layers, name, None), raising=False)
    name = "LinearWithGradAccumulationAndAsyncCommunication"
    monkeypatch.setattr(layers, name, getattr(layers, name))
    current().prepare_megatron()
    use_accumulating_products()
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", OnAnyDevice)


@pytest.mark.parametrize("packed", [False, True], ids=["kept", "computed again"])
def test_the_parameter_knows_that_its_gradient_was_added(packed: bool, products: None) -> None:
    """Reducing gradients during the backward pass starts when a parameter gets some gradient, and asks it for this."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3, 4))
    weight.main_grad = torch.ones(3, 4)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    source = torch.randn(5, 4, requires_grad=True)
    inputs = source * 2
    seen: list[Any] = []
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad is not None))
    with lean(cheap(inputs, lambda: source * 2) if packed else inputs):
        function = layers.LinearWithGradAccumulationAndAsyncCommunication
        output = function.apply(inputs, weight, None, True, False, False, None, 0, None)
    gradient = torch.randn(5, 3)
    output.backward(gradient)

    assert seen == [True]
    assert weight.grad_added_to_main_grad
    torch.testing.assert_close(weight.main_grad, 1 + gradient.t() @ (source.detach() * 2))
    torch.testing.assert_close(source.grad, 2 * gradient @ weight.detach())
