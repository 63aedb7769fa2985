"""SwiGLU (https://arxiv.org/abs/2002.05202), ``silu(gate) * up``, in one pass forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["swiglu", "weighted_swiglu", "weighted_swiglu_gradients"]

BLOCK = 2048


@triton.jit
def _gate_and_up(x, row, column, inside, width):
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _write_gradient(dx, gradient, gate, up, row, column, inside, width):
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(dx + row * 2 * width + column, gradient * up * (sigmoid + silu * (1 - sigmoid)), mask=inside)
    tl.store(dx + row * 2 * width + width + column, gradient * silu, mask=inside)


@triton.jit
def _activate(x, y, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate, up = _gate_and_up(x, row, column, inside, width)
    tl.store(y + row * width + column, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _activate_gradient(dy, x, dx, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate, up = _gate_and_up(x, row, column, inside, width)
    gradient = tl.load(dy + row * width + column, mask=inside, other=0.0).to(tl.float32)
    _write_gradient(dx, gradient, gate, up, row, column, inside, width)


@triton.jit
def _activate_weighted(x, weights, y, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(weights + row).to(tl.float32)
    gate, up = _gate_and_up(x, row, column, inside, width)
    tl.store(y + row * width + column, gate * tl.sigmoid(gate) * up * weight, mask=inside)


@triton.jit
def _activate_weighted_gradient(dy, x, weights, dx, y, dw, rows, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    if row < tl.load(rows):
        weight = tl.load(weights + row).to(tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < width
            gate, up = _gate_and_up(x, row, column, inside, width)
            gradient = tl.load(dy + row * width + column, mask=inside, other=0.0).to(tl.float32)
            output = gate * tl.sigmoid(gate) * up
            total += gradient * output
            _write_gradient(dx, gradient * weight, gate, up, row, column, inside, width)
            tl.store(y + row * width + column, output * weight, mask=inside)
    tl.store(dw + row, tl.sum(total, 0))


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


def weighted_swiglu(x: Tensor, weights: Tensor) -> Tensor:
    """[R, 2F], [R] → ``silu(gate) * up * weight`` [R, F] of x's type; computed in float32, rounded once."""
    rows, width = len(x), x.shape[1] // 2
    y = x.new_empty(rows, width)
    if y.numel():
        block = min(BLOCK, triton.next_power_of_2(width))
        _activate_weighted[(rows, triton.cdiv(width, block))](x, weights, y, width, block)
    return y


def weighted_swiglu_gradients(dy: Tensor, x: Tensor, weights: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x [R, 2F] and, float32, of the weights [R]; and once more the output [R, F], which was not kept.

    Args:
        dy: [R, F], of the output.
        rows: int64, one number on the device: how many of the R rows there are. Those behind have no gradient.
    """
    count, width = dy.shape
    dx, y = torch.empty_like(x), torch.empty_like(dy)
    dw = torch.empty(count, dtype=torch.float32, device=x.device)
    if dy.numel():
        block = min(BLOCK, triton.next_power_of_2(width))
        _activate_weighted_gradient[(count,)](dy, x, weights, dx, y, dw, rows, width, block)
    return dx, dw, y
