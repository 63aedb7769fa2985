"""torch's flash attention for packed segments; its output can be kept while layers wait to be recomputed.

Shapes: T queries, K keys, H query heads, G key/value heads, D width of a head.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["Kept", "flash_attention"]

Kept: TypeAlias = dict[int, tuple[Tensor, ...]]
"""What the kernel answered, output and logarithms of denominators, by layer: between a forward pass without gradients
and its repetition with them."""

WIDTHS = (64, 128)
"""Of heads, for which our own forward kernel is the faster one."""


class _Flash(torch.autograd.Function):
    """The kernel aligns queries and keys of a segment at their ends, so that the last query sees all keys."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        offsets: tuple[Tensor, Tensor],
        longest: tuple[int, int],
        scale: float,
        answer: tuple[Tensor, ...] | None,
    ) -> Tensor:
        if answer is None:
            answer = _answer(query, key, value, offsets, longest, scale)
        out, log_sums = answer
        ctx.save_for_backward(query, key, value, out, log_sums, *offsets)
        ctx.longest, ctx.scale = longest, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sums, *offsets = ctx.saved_tensors
        nothing = query.new_empty(2, dtype=torch.uint64)  # dropout would need a random state
        found = torch.ops.aten._flash_attention_backward(
            gradients[0].contiguous(), query, key, value, out, log_sums, *offsets, *ctx.longest,
            0.0, True, nothing, nothing, scale=ctx.scale,
        )  # fmt: skip
        return *found, None, None, None, None


def _answer(
    query: Tensor, key: Tensor, value: Tensor, offsets: tuple[Tensor, Tensor], longest: tuple[int, int], scale: float
) -> tuple[Tensor, ...]:
    if query.shape[-1] in WIDTHS:
        from vime.training.kernels.attention import attention_forward

        return attention_forward(query, key, value, offsets, longest, scale)
    answer: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
        query, key, value, *offsets, *longest, 0.0, True, False, scale=scale
    )
    return answer[:2]


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float,
    *,
    layer: int,
    kept: Kept | None,
) -> Tensor:
    """[T, H, D], [K, G, D], [K, G, D] → [T, H, D], in bfloat16 or float16, causal inside each segment.

    Args:
        offsets: int32 [N + 1] each, where the segments of queries and of keys begin.
        longest: the most queries and keys of a segment.
        layer: whose attention this is.
        kept: where a pass without gradients leaves its answer, and its repetition takes it; None: nowhere.
    """
    if kept is None:
        answer = None
    elif torch.is_grad_enabled():
        answer = kept.pop(layer, None)
    else:
        answer = kept[layer] = _answer(query, key, value, offsets, longest, scale)
        return answer[0]
    out: Tensor = _Flash.apply(query, key, value, offsets, longest, scale, answer)  # type: ignore[no-untyped-call]
    return out
