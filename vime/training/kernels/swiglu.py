"""SwiGLU (https://arxiv.org/abs/2002.05202), ``silu(gate) * up``, in one pass forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["swiglu"]

BLOCK = 2048


@triton.jit
def _activate(x, y, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _activate_gradient(dy, x, dx, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(dy + row * width + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(dx + row * 2 * width + column, gradient * up * (sigmoid + silu * (1 - sigmoid)), mask=inside)
    tl.store(dx + row * 2 * width + width + column, gradient * silu, mask=inside)


def _grid(x: Tensor) -> tuple[int, int]:
    width = x.shape[-1] // 2
    return x.numel() // (2 * width), triton.cdiv(width, BLOCK)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        y = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        if y.numel():
            _activate[_grid(x)](x, y, y.shape[-1], BLOCK)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        if x.numel():
            _activate_gradient[_grid(x)](gradients[0].contiguous(), x, dx, x.shape[-1] // 2, BLOCK)
        return dx


def swiglu(x: Tensor) -> Tensor:
    """Gate and up side by side [..., 2F] → ``silu(gate) * up`` [..., F]; computed in float32, rounded once."""
    y: Tensor = _Swiglu.apply(x)
    return y
