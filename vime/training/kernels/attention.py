"""Causal attention of packed segments, forward: exact softmax, block by block (https://arxiv.org/abs/2307.08691).

torch's own kernel is written for Ampere; this one comes to Hopper's matrix units through Triton. Its output and
logarithms of denominators are in the form of torch's, whose backward pass takes them.

Shapes: T queries, K keys, H query heads, G key/value heads, D width of a head, N segments.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["attention_forward"]

ROWS, COLUMNS, WARPS, STAGES = 64, 64, 4, 3
"""The fastest of 24 on an H200, for 32 query and 8 key heads of 128 channels and segments of 677 to 3,970 tokens."""
LOG2_E = 1.4426950408889634


@triton.jit
def _attend(
    total, denominator, peak, q, k_at, v_at, k_stride, first, last, row, shift, keys, factor,
    MASKED: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Adds the keys from first to last to the running softmax of a block of rows."""
    column = tl.arange(0, COLUMNS)
    for start in range(first, last, COLUMNS):
        start = tl.multiple_of(start, COLUMNS)
        if MASKED:
            there = (start + column < keys)[:, None]
            k = tl.load(k_at + (start + column)[:, None] * k_stride, mask=there, other=0.0)
            v = tl.load(v_at + (start + column)[:, None] * k_stride, mask=there, other=0.0)
        else:
            k = tl.load(k_at + (start + column)[:, None] * k_stride)
            v = tl.load(v_at + (start + column)[:, None] * k_stride)
        score = tl.dot(q, tl.trans(k))
        if MASKED:
            score = tl.where((start + column)[None] <= (row + shift)[:, None], score, -float("inf"))
        higher = tl.maximum(peak, tl.max(score, 1) * factor)
        weight = tl.exp2(score * factor - higher[:, None])
        shrink = tl.exp2(peak - higher)
        denominator = denominator * shrink + tl.sum(weight, 1)
        total = tl.dot(weight.to(v.dtype), v, total * shrink[:, None])
        peak = higher
    return total, denominator, peak


@triton.jit
def _attention_forward(
    query, key, value, out, log_sums, q_offsets, k_offsets, tokens, heads, shared, factor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    head = tl.program_id(1)
    segment = tl.program_id(2)
    q_first = tl.load(q_offsets + segment).to(tl.int64)
    queries = tl.load(q_offsets + segment + 1).to(tl.int32) - q_first.to(tl.int32)
    if block * ROWS < queries:
        k_first = tl.load(k_offsets + segment).to(tl.int64)
        keys = tl.load(k_offsets + segment + 1).to(tl.int32) - k_first.to(tl.int32)
        groups = heads // shared
        row = block * ROWS + tl.arange(0, ROWS)
        channel = tl.arange(0, WIDTH)
        there = (row < queries)[:, None]
        at = ((q_first + row)[:, None] * heads + head) * WIDTH + channel[None]
        q = tl.load(query + at, mask=there, other=0.0)
        k_stride = groups * WIDTH
        base = (k_first * groups + head // shared) * WIDTH + channel[None]
        shift = keys - queries
        total = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
        denominator = tl.zeros([ROWS], dtype=tl.float32)
        peak = tl.full([ROWS], -float("inf"), dtype=tl.float32)
        whole = (block * ROWS + shift + 1) // COLUMNS * COLUMNS
        whole = tl.minimum(whole, keys // COLUMNS * COLUMNS)
        end = tl.minimum((block + 1) * ROWS + shift, keys)
        total, denominator, peak = _attend(
            total, denominator, peak, q, key + base, value + base, k_stride, 0, whole, row, shift, keys, factor,
            False, COLUMNS, WIDTH,
        )  # fmt: skip
        total, denominator, peak = _attend(
            total, denominator, peak, q, key + base, value + base, k_stride, whole, end, row, shift, keys, factor,
            True, COLUMNS, WIDTH,
        )  # fmt: skip
        tl.store(out + at, (total / denominator[:, None]).to(out.dtype.element_ty), mask=there)
        log_sum = (peak + tl.log2(denominator)) * 0.6931471805599453
        tl.store(log_sums + head.to(tl.int64) * tokens + q_first + row, log_sum, mask=row < queries)


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """[T, H, D], [K, G, D], [K, G, D] → [T, H, D] and, float32, [H, T]; all contiguous, D a power of two.

    Args:
        offsets: int32 [N + 1] each, where the segments of queries and of keys begin. The last query of a segment sees
            its last key.
        longest: the most queries and keys of a segment.
    """
    tokens, heads, width = query.shape
    out = torch.empty_like(query)
    log_sums = torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
    grid: Any = (triton.cdiv(longest[0], ROWS), heads, len(offsets[0]) - 1)
    _attention_forward[grid](
        query, key, value, out, log_sums, *offsets, tokens, heads, heads // key.shape[1], scale * LOG2_E,
        ROWS, COLUMNS, width, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out, log_sums
