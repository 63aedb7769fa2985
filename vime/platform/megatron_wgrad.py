"""Gradients of weights added to Megatron's float32 buffers by the matrix product itself.

Megatron looks for the kernel ``fused_weight_gradient_mlp_cuda`` of Apex (tensor_parallel/layers.py:569). cuBLAS does it
through ``torch.addmm`` with another output dtype: no gradient in bfloat16 is written and added afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vime.platform.megatron_on_cpu import Site

__all__ = ["SITES", "use_accumulating_products"]

SITES = (Site("tensor_parallel/layers.py", 569, "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32("),)


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
