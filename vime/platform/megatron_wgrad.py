"""Gradients of weights added to Megatron's float32 buffers by the matrix product itself.

Megatron looks for the kernel ``fused_weight_gradient_mlp_cuda`` of Apex (tensor_parallel/layers.py:569). cuBLAS does it
through ``torch.addmm`` with another output dtype: no gradient in bfloat16 is written and added afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vime.platform.megatron_on_cpu import Site

__all__ = ["SITES", "use_accumulating_products"]

SITES = (
    Site("tensor_parallel/layers.py", 569, "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32("),
    Site("tensor_parallel/layers.py", 581, 'if hasattr(weight, "grad_added_to_main_grad"):'),
    Site("tensor_parallel/layers.py", 745, "return LinearWithGradAccumulationAndAsyncCommunication.apply(*args)"),
    Site("distributed/distributed_data_parallel.py", 436, "), 'param.grad being None is not safe"),
)


class _Products:
    """The functions that Megatron calls on Apex's module."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, gradients: Tensor, total: Tensor) -> None:
        """total [O, I] += gradients [T, O]^T @ inputs [T, I]; ``total`` is float32, the others bfloat16 or float16."""
        torch.addmm(total, gradients.t(), inputs, out_dtype=torch.float32, out=total)


def use_accumulating_products() -> None:
    """Makes them available to layers that are built with ``gradient_accumulation_fusion``."""
    from megatron.core.tensor_parallel import layers

    layers.fused_weight_gradient_mlp_cuda = _Products
    layers._grad_accum_fusion_available = True
    if not hasattr(layers.LinearWithGradAccumulationAndAsyncCommunication, "of_a_parameter"):
        layers.LinearWithGradAccumulationAndAsyncCommunication = _remembering_its_parameter(
            layers.LinearWithGradAccumulationAndAsyncCommunication
        )


def _remembering_its_parameter(linear: Any) -> Any:
    """Megatron's linear function, which tells the parameter itself that its gradient was added.

    Where hooks pack what is saved for the backward pass, a saved weight comes back as another tensor without the
    attributes of the parameter. Megatron then gives the parameter no gradient at all, and reducing gradients during the
    backward pass needs one, of whatever value, to start from.
    """

    class Linear(linear):  # type: ignore[misc]
        of_a_parameter = True

        @staticmethod
        def forward(ctx: Any, inputs: Tensor, weight: Tensor, *others: Any) -> Any:
            ctx.parameter = weight
            return linear.forward(ctx, inputs, weight, *others)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            d_input, d_weight, *others = linear.backward(ctx, gradient)
            if d_weight is None and hasattr(ctx.parameter, "grad_added_to_main_grad"):
                ctx.parameter.grad_added_to_main_grad = True
                d_weight = torch.empty_like(ctx.parameter)  # nobody reads it
            return d_input, d_weight, *others

    return Linear
