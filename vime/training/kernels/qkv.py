"""From the output of the joint projection to queries, keys and values for attention, in one pass.

Split by query groups, RMSNorm of each query and key head (where the model has it) and rotation. Only the projection's
output is kept for the backward pass, which gives its gradient in one pass too.

Shapes: T tokens, G query groups, Q queries a group, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["split_norm_rotate"]

PROGRAMS = 132 * 16
"""Programs of the backward pass, each with its own partial sums for the weights of the norms."""


@triton.jit
def _load_rows(mixed, token, head, heads, column, half, token_stride, HALF: tl.constexpr):
    """Both halves of the channels of these heads, float32 [HEADS, HALF] each."""
    inside = (head < heads)[:, None] & (column < half)[None]
    at = mixed + token * token_stride + head[:, None] * 2 * half + column[None]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _split(
    mixed, q_weight, k_weight, cos, sin, q, k, v, heads, queries, half, token_stride, epsilon,
    NORM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, HALF)
    group, place = head // (queries + 2), head % (queries + 2)
    first, second = _load_rows(mixed, token, head, heads, column, half, token_stride, HALF)
    is_query, is_key, is_value = place < queries, place == queries, place > queries
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * half) + epsilon)
        scale = tl.where(is_value, 1.0, scale)[:, None]
        there = column < half
        for_query, for_value = is_query[:, None], is_value[:, None]
        w1 = tl.where(for_query, tl.load(q_weight + column, mask=there).to(tl.float32)[None],
                      tl.load(k_weight + column, mask=there).to(tl.float32)[None])  # fmt: skip
        w2 = tl.where(for_query, tl.load(q_weight + half + column, mask=there).to(tl.float32)[None],
                      tl.load(k_weight + half + column, mask=there).to(tl.float32)[None])  # fmt: skip
        first *= scale * tl.where(for_value, 1.0, w1)
        second *= scale * tl.where(for_value, 1.0, w2)
    c = tl.load(cos + token * half + column, mask=column < half).to(tl.float32)[None]
    s = tl.load(sin + token * half + column, mask=column < half).to(tl.float32)[None]
    c = tl.where(is_value[:, None], 1.0, c)
    s = tl.where(is_value[:, None], 0.0, s)
    one, two = first * c - second * s, second * c + first * s
    inside = (head < heads)[:, None] & (column < half)[None]
    groups = heads // (queries + 2)
    to_q = q + ((token * groups + group) * queries + place)[:, None] * 2 * half + column[None]
    to_k = k + (token * groups + group)[:, None] * 2 * half + column[None]
    to_v = v + (token * groups + group)[:, None] * 2 * half + column[None]
    tl.store(to_q, one, mask=inside & is_query[:, None])
    tl.store(to_q + half, two, mask=inside & is_query[:, None])
    tl.store(to_k, one, mask=inside & is_key[:, None])
    tl.store(to_k + half, two, mask=inside & is_key[:, None])
    tl.store(to_v, one, mask=inside & is_value[:, None])
    tl.store(to_v + half, two, mask=inside & is_value[:, None])


@triton.jit
def _split_gradient(
    dq, dk, dv, mixed, q_weight, k_weight, cos, sin, dmixed, partial,
    tokens, heads, queries, half, token_stride, epsilon,
    NORM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, HALF)
    there = column < half
    groups = heads // (queries + 2)
    dq1, dq2 = tl.zeros([HALF], tl.float32), tl.zeros([HALF], tl.float32)
    dk1, dk2 = tl.zeros([HALF], tl.float32), tl.zeros([HALF], tl.float32)
    for at in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = (at + tl.zeros([1], tl.int32)).to(tl.int64)
        c = tl.load(cos + token * half + column, mask=there).to(tl.float32)[None]
        s = tl.load(sin + token * half + column, mask=there).to(tl.float32)[None]
        for start in range(0, heads, HEADS):
            head = start + tl.arange(0, HEADS)
            group, place = head // (queries + 2), head % (queries + 2)
            for_query, for_value = (place < queries)[:, None], (place > queries)[:, None]
            inside = (head < heads)[:, None] & there[None]
            of_query = inside & for_query
            of_value = inside & for_value
            of_key = inside & (place == queries)[:, None]
            from_q = dq + ((token * groups + group) * queries + place)[:, None] * 2 * half + column[None]
            offset = (token * groups + group)[:, None] * 2 * half + column[None]
            one = tl.load(from_q, mask=of_query, other=0.0).to(tl.float32)
            two = tl.load(from_q + half, mask=of_query, other=0.0).to(tl.float32)
            one += tl.load(dk + offset, mask=of_key, other=0.0).to(tl.float32)
            two += tl.load(dk + offset + half, mask=of_key, other=0.0).to(tl.float32)
            one += tl.load(dv + offset, mask=of_value, other=0.0).to(tl.float32)
            two += tl.load(dv + offset + half, mask=of_value, other=0.0).to(tl.float32)
            turn_c, turn_s = tl.where(for_value, 1.0, c), tl.where(for_value, 0.0, s)
            g1, g2 = one * turn_c + two * turn_s, two * turn_c - one * turn_s
            if NORM:
                first, second = _load_rows(mixed, token, head, heads, column, half, token_stride, HALF)
                scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * half) + epsilon)[
                    :, None
                ]
                n1, n2 = first * scale, second * scale
                dq1 += tl.sum(tl.where(of_query, g1 * n1, 0.0), 0)
                dq2 += tl.sum(tl.where(of_query, g2 * n2, 0.0), 0)
                dk1 += tl.sum(tl.where(of_key, g1 * n1, 0.0), 0)
                dk2 += tl.sum(tl.where(of_key, g2 * n2, 0.0), 0)
                w1 = tl.where(for_query, tl.load(q_weight + column, mask=there).to(tl.float32)[None],
                              tl.load(k_weight + column, mask=there).to(tl.float32)[None])  # fmt: skip
                w2 = tl.where(for_query, tl.load(q_weight + half + column, mask=there).to(tl.float32)[None],
                              tl.load(k_weight + half + column, mask=there).to(tl.float32)[None])  # fmt: skip
                h1, h2 = g1 * w1, g2 * w2
                mean = ((tl.sum(h1 * n1, 1) + tl.sum(h2 * n2, 1)) / (2 * half))[:, None]
                g1 = tl.where(for_value, g1, (h1 - n1 * mean) * scale)
                g2 = tl.where(for_value, g2, (h2 - n2 * mean) * scale)
            to = dmixed + (token * heads)[:, None] * 2 * half + head[:, None] * 2 * half + column[None]
            tl.store(to, g1, mask=inside)
            tl.store(to + half, g2, mask=inside)
    if NORM:
        own = partial + tl.program_id(0) * 4 * half + column
        tl.store(own, dq1, mask=there)
        tl.store(own + half, dq2, mask=there)
        tl.store(own + 2 * half, dk1, mask=there)
        tl.store(own + 3 * half, dk2, mask=there)


class _SplitNormRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        groups: int,
        epsilon: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        mixed = mixed if mixed.stride(-1) == 1 else mixed.contiguous()
        tokens, half = len(mixed), cos.shape[-1]
        heads = mixed.shape[-1] // (2 * half)
        queries = heads // groups - 2
        q = mixed.new_empty(tokens, groups * queries, 2 * half)
        k, v = (mixed.new_empty(tokens, groups, 2 * half) for _ in range(2))
        ctx.save_for_backward(mixed, q_weight, k_weight, cos, sin)
        ctx.heads, ctx.queries, ctx.half, ctx.epsilon = heads, queries, half, epsilon
        if tokens:
            block = _heads(heads, half, 1024)
            grid: Any = (tokens, triton.cdiv(heads, block))
            _split[grid](
                mixed, q_weight, k_weight, cos, sin, q, k, v, heads, queries, half, mixed.stride(0), epsilon,
                q_weight is not None, block, triton.next_power_of_2(half),
            )  # fmt: skip
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mixed, q_weight, k_weight, cos, sin = ctx.saved_tensors
        tokens, heads, half = len(mixed), ctx.heads, ctx.half
        dq, dk, dv = (gradient.contiguous() for gradient in gradients)
        dmixed = mixed.new_empty(tokens, heads * 2 * half)
        norm = q_weight is not None
        programs = min(tokens, PROGRAMS)
        partial = torch.zeros(programs, 4 * half if norm else 0, dtype=torch.float32, device=mixed.device)
        if tokens:
            grid: Any = (programs,)
            _split_gradient[grid](
                dq, dk, dv, mixed, q_weight, k_weight, cos, sin, dmixed, partial, tokens, heads, ctx.queries, half,
                mixed.stride(0), ctx.epsilon, norm, _heads(heads, half, 512), triton.next_power_of_2(half), num_warps=1,
            )  # fmt: skip
        if not norm:
            return dmixed, None, None, None, None, None, None
        of_q, of_k = partial.sum(0).to(q_weight.dtype).chunk(2)
        return dmixed, of_q, of_k, None, None, None, None


def _heads(heads: int, half: int, elements: int) -> int:
    """Heads of one tile of about that many elements."""
    return min(triton.next_power_of_2(heads), max(elements // triton.next_power_of_2(half), 1))


def split_norm_rotate(
    mixed: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    groups: int,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """mixed [T, G·(Q+2)·D] → queries [T, G·Q, D], keys [T, G, D], values [T, G, D].

    The order in ``mixed`` is Megatron's: group after group its queries, its key, its value. cos and sin are
    [T, 1, D/2]; channel i of a head goes with i + D/2. Both norm weights [D] are given, or neither.
    """
    q, k, v = _SplitNormRotate.apply(mixed, q_weight, k_weight, cos, sin, groups, epsilon)
    return q, k, v
