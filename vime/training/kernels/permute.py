"""Tokens to the rows of their experts and back, in one pass over memory each, without a wait for the device.

Shapes: N tokens, E experts, K experts a token, R = N·K rows, H channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Places", "collect", "places_of", "spread"]

TOKENS = 16
"""Of a program that finds places."""
ROWS = 8
"""Of a program that copies them: enough bytes on their way to hide how long they take."""


class Places(NamedTuple):
    """Where the rows of tokens are when rows are sorted by expert, then by token."""

    pairs: Tensor  # int64 [R]: token · E + expert of each row; 0 behind the last row where some token has fewer than K
    rows: Tensor  # int32 [N, K]: the rows of each token; -1 where it has fewer


@triton.jit
def _place(chosen, rank, pairs, rows, tokens, experts, top_k, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    inside = (token < tokens)[:, None] & (expert < experts)[None]
    pair = token.to(tl.int64)[:, None] * experts + expert[None]
    here = tl.load(chosen + pair, mask=inside, other=0).to(tl.int32)
    turn = tl.cumsum(here, 1) - here
    there = here != 0
    row = tl.load(rank + expert.to(tl.int64)[None] * tokens + token[:, None], mask=there, other=1) - 1
    tl.store(pairs + row, pair, mask=there)
    tl.store(rows + token[:, None] * top_k + turn, row, mask=there)


@triton.jit
def _copy_rows(x, sources, y, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    source = tl.load(sources + row, mask=row < rows, other=0).to(tl.int64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < width)[None]
        value = tl.load(x + source[:, None] * width + column[None], mask=inside)
        tl.store(y + row[:, None] * width + column[None], value, mask=inside)


@triton.jit
def _add_rows(x, rows, y, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for choice in tl.static_range(TOP_K):
            row = tl.load(rows + token * TOP_K + choice).to(tl.int64)
            there = column < tl.where(row < 0, 0, width)
            total += tl.load(x + row * width + column, mask=there, other=0.0).to(tl.float32)
        tl.store(y + token * width + column, total.to(y.dtype.element_ty), mask=column < width)


def places_of(chosen: Tensor, top_k: int) -> Places:
    """Args: chosen bool [N, E], at most ``top_k`` of them for each token."""
    tokens, experts = chosen.shape
    rank = chosen.t().contiguous().flatten().cumsum(0, dtype=torch.int32)
    pairs = torch.zeros(tokens * top_k, dtype=torch.int64, device=chosen.device)
    rows = torch.full((tokens, top_k), -1, dtype=torch.int32, device=chosen.device)
    if tokens:
        grid: Any = (triton.cdiv(tokens, TOKENS),)
        _place[grid](
            chosen.contiguous().view(torch.uint8), rank, pairs, rows, tokens, experts, top_k,
            TOKENS, triton.next_power_of_2(experts),
        )  # fmt: skip
    return Places(pairs, rows)


def _copied(x: Tensor, sources: Tensor) -> Tensor:
    y = x.new_empty(len(sources), x.shape[1])
    if y.numel():
        grid: Any = (triton.cdiv(len(y), ROWS),)
        block = min(2048, triton.next_power_of_2(x.shape[1]))
        _copy_rows[grid](x, sources, y, len(y), x.shape[1], ROWS, block, num_warps=8)
    return y


def _added(x: Tensor, rows: Tensor) -> Tensor:
    y = x.new_empty(len(rows), x.shape[1])
    if y.numel():
        grid: Any = (len(y),)
        _add_rows[grid](
            x, rows, y, x.shape[1], rows.shape[1], min(2048, triton.next_power_of_2(x.shape[1])), num_warps=8
        )
    return y


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, sources: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return _copied(tokens.contiguous(), sources)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return _added(gradients[0].contiguous(), rows), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, sources: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(sources)
        return _added(outputs.contiguous(), rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (sources,) = ctx.saved_tensors
        return _copied(gradients[0].contiguous(), sources), None, None


def spread(tokens: Tensor, sources: Tensor, rows: Tensor) -> Tensor:
    """[N, H] → [R, H]: the token of each row. Gradients of a token's rows are summed in float32.

    Args:
        sources: int64 [R], the token of each row.
        rows: int32 [N, K], the rows of each token, or -1.
    """
    y: Tensor = _Spread.apply(tokens, sources, rows)
    return y


def collect(outputs: Tensor, sources: Tensor, rows: Tensor) -> Tensor:
    """[R, H] → [N, H]: the sum of each token's rows, in float32, rounded once; arguments as of ``spread``."""
    y: Tensor = _Collect.apply(outputs, sources, rows)
    return y
