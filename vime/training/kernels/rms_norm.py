"""RMSNorm (https://arxiv.org/abs/1910.07467) in one pass forward and one backward; keeps only the input and 1/rms.

Shapes: R rows, C columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["rms_norm"]

ELEMENTS = 4096
"""Of a tile: a few rows of a head's width, or one row of a wide hidden state."""
PROGRAMS = 132 * 8
"""Programs of the backward pass, each with its own partial sum for the weight: a few for every multiprocessor."""


@triton.jit
def _norm(x, weight, y, inverse, rows, columns, epsilon, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None]
    at = row[:, None] * columns + column[None]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / columns + epsilon)
    w = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(y + at, value * scale[:, None] * w[None], mask=inside)
    tl.store(inverse + row, scale, mask=row < rows)


@triton.jit
def _norm_gradient(dy, x, weight, inverse, dx, dw, rows, columns, tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    w = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & (column < columns)[None]
        at = row[:, None] * columns + column[None]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(inverse + row, mask=row < rows, other=0.0)
        normal = value * scale[:, None]
        total += tl.sum(gradient * normal, 0)
        gradient *= w[None]
        mean = tl.sum(gradient * normal, 1) / columns
        tl.store(dx + at, (gradient - normal * mean[:, None]) * scale[:, None], mask=inside)
    tl.store(dw + tl.program_id(0) * columns + column, total, mask=column < columns)


def _tile(columns: int) -> tuple[int, int]:
    width: int = triton.next_power_of_2(columns)
    return max(ELEMENTS // width, 1), width


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        x = x.contiguous()
        columns = x.shape[-1]
        rows = x.numel() // columns
        height, width = _tile(columns)
        y = torch.empty_like(x)
        inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
        if rows:
            _norm[(triton.cdiv(rows, height),)](x, weight, y, inverse, rows, columns, epsilon, height, width)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        dy = gradients[0].contiguous()
        columns, rows = x.shape[-1], len(inverse)
        height, width = _tile(columns)
        tiles = triton.cdiv(rows, height)
        programs = min(tiles, PROGRAMS)
        dx = torch.empty_like(x)
        partial = torch.empty(programs, columns, dtype=torch.float32, device=x.device)
        if rows:
            _norm_gradient[(programs,)](dy, x, weight, inverse, dx, partial, rows, columns, tiles, height, width)
        return dx, partial.sum(0).to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension [..., C]; computed in float32, rounded once to x's dtype."""
    y: Tensor = _RmsNorm.apply(x, weight, epsilon)
    return y
