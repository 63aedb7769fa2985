"""Rotation of query and key heads in one pass. Shapes: T tokens, H heads, D width of a head, R rotated channels."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["rotated"]


@triton.jit
def _rotate(
    x, cos, sin, y, heads, width, half, token_stride, head_stride,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    pair = tl.arange(0, HALF)
    c = tl.load(cos + token * half + pair, mask=pair < half, other=0.0).to(tl.float32)[None]
    s = tl.load(sin + token * half + pair, mask=pair < half, other=0.0).to(tl.float32)[None]
    inside = (head < heads)[:, None] & (pair < half)[None]
    source = x + token * token_stride + head[:, None] * head_stride
    target = y + (token * heads + head[:, None]) * width
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else first + half
    a = tl.load(source + first[None], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + second[None], mask=inside, other=0.0).to(tl.float32)
    tl.store(target + first[None], a * c - b * s, mask=inside)
    tl.store(target + second[None], b * c + a * s, mask=inside)
    if REST > 0:
        channel = 2 * half + tl.arange(0, REST)
        there = (head < heads)[:, None] & (channel < width)[None]
        tl.store(target + channel[None], tl.load(source + channel[None], mask=there, other=0.0), mask=there)


def rotated(x_thd: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """x [T, H, D] with its first R channels turned by the angles of cos and sin [T, 1, R/2]; others are copied.

    Channel i goes with i + R/2, or 2i with 2i + 1 when ``interleaved``. A negative sin turns the other way.
    """
    x_thd = x_thd if x_thd.stride(-1) == 1 else x_thd.contiguous()
    tokens, heads, width = x_thd.shape
    half = cos.shape[-1]
    y = torch.empty((tokens, heads, width), dtype=x_thd.dtype, device=x_thd.device)
    if not y.numel():
        return y
    block = min(triton.next_power_of_2(heads), max(4096 // triton.next_power_of_2(half), 1))
    rest = width - 2 * half
    grid: Any = (tokens, triton.cdiv(heads, block))
    _rotate[grid](
        x_thd, cos, sin, y, heads, width, half, x_thd.stride(0), x_thd.stride(1),
        interleaved, block, triton.next_power_of_2(half), triton.next_power_of_2(rest) if rest else 0,
    )  # fmt: skip
    return y
