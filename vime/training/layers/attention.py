"""Causal attention inside the segments of a packed micro-batch, with rotary positions.

Shapes in comments: T tokens, H query heads, G key/value heads, D width of a head, N segments of L rows.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from vime.platform import current
from vime.training.layers.rope import rotate
from vime.training.layers.segments import SegmentGroup, Segments

__all__ = ["Attention", "attend", "tree_tokens"]

DIRECT_LENGTH = 384
"""Segments up to this length are attended by plain matrix products. The CPU's flash kernel is made for long
sequences: forward and backward of 64 segments of 34 tokens take it six times as long as these products, and at 384
tokens the two are equal."""

TREE_TOKENS = 512
"""Samples share a prompt in segments of up to this length. Longer ones cost more in scores that are masked out than the
shared tokens save."""


def tree_tokens() -> int:
    """The longest segment in which samples should share a prompt; 0 where the kernel knows no branches."""
    return 0 if current().segment_kernel else TREE_TOKENS


class Attention(MegatronModule):  # type: ignore[misc]
    """Megatron's ``core_attention`` for packed sequences; it also applies the rotary positions.

    Megatron would compute cosine and sine again in every layer, so the model is built without its rotary embedding and
    the table comes with the segments.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert config.context_parallel_size == 1, "context parallelism is refused where the configuration is checked"
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Segments | None = None,
    ) -> Tensor:
        """[T, H, D], [T, G, D], [T, G, D] → [T, H·D]."""
        assert isinstance(packed_seq_params, Segments), "micro-batches are always packed"
        if packed_seq_params.rope is not None:
            query, key = (rotate(x, packed_seq_params.rope) for x in (query, key))
        return attend(query, key, value, packed_seq_params, scale=self.scale).flatten(1)


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scale: float | None = None) -> Tensor:
    """Causal attention of each segment to itself; ``scale`` defaults to D^-½."""
    if current().segment_kernel and query.dtype in (torch.bfloat16, torch.float16):
        return _flash(query, key, value, segments, scale)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    groups = segments.groups
    if len(groups) == 1 and groups[0].whole:
        return _attend_group(query, key, value, groups[0], scale)
    batches = zip(groups, *(_gather(x, groups) for x in (query, key, value)), strict=True)
    return _scatter(groups, [_attend_group(q, k, v, group, scale) for group, q, k, v in batches])


def _gather(x: Tensor, groups: tuple[SegmentGroup, ...]) -> tuple[Tensor, ...]:
    cells: tuple[Tensor, ...] = _Gather.apply(x, groups)  # type: ignore[no-untyped-call]
    return cells


def _scatter(groups: tuple[SegmentGroup, ...], outputs: list[Tensor]) -> Tensor:
    tokens: Tensor = _Scatter.apply(groups, *outputs)  # type: ignore[no-untyped-call]
    return tokens


class _Gather(torch.autograd.Function):
    """[T, …] → the cells of each group, [N·L, …]. Each token has one cell, so backward only copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: tuple[SegmentGroup, ...]) -> tuple[Tensor, ...]:
        ctx.groups = groups
        return tuple(x.index_select(0, group.cells) for group in groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _tokens_of(ctx.groups, gradients), None


class _Scatter(torch.autograd.Function):
    """The cells of each group → [T, …]; what padding cells hold is dropped and gets no gradient."""

    @staticmethod
    def forward(ctx: Any, groups: tuple[SegmentGroup, ...], *outputs: Tensor) -> Tensor:
        ctx.groups = groups
        return _tokens_of(groups, outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        return None, *(_cells_of(group, gradient) for group in ctx.groups)


def _tokens_of(groups: tuple[SegmentGroup, ...], cells: tuple[Tensor, ...]) -> Tensor:
    out = cells[0].new_empty(sum(len(group.tokens) for group in groups), *cells[0].shape[1:])
    for group, values in zip(groups, cells, strict=True):
        out.index_copy_(0, group.tokens, values.index_select(0, group.filled))
    return out


def _cells_of(group: SegmentGroup, tokens: Tensor) -> Tensor:
    cells = tokens.new_zeros(len(group.cells), *tokens.shape[1:])
    return cells.index_copy_(0, group.filled, tokens.index_select(0, group.tokens))


def _attend_group(query: Tensor, key: Tensor, value: Tensor, group: SegmentGroup, scale: float) -> Tensor:
    """[N·L, H, D], [N·L, G, D], [N·L, G, D] → [N·L, H, D]."""
    if group.length <= DIRECT_LENGTH:
        return _direct(query, key, value, group, scale)
    q, k, v = (x.view(-1, group.length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
    seen = None if group.hidden is None else ~group.hidden[:, None]
    shared = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, scale=scale, enable_gqa=shared)
    return out.transpose(1, 2).flatten(0, 1)


def _direct(query: Tensor, key: Tensor, value: Tensor, group: SegmentGroup, scale: float) -> Tensor:
    """Softmax of the whole L·L scores of each head, in float32. The heads of a group share their keys as more rows."""
    length = group.length
    heads, groups = query.shape[1], key.shape[1]
    rows = heads // groups * length
    q_nghld = query.view(-1, length, groups, heads // groups, query.shape[-1]).permute(0, 2, 3, 1, 4)
    q = q_nghld.reshape(-1, rows, query.shape[-1])
    k, v = (x.view(-1, length, groups, x.shape[-1]).transpose(1, 2).flatten(0, 1) for x in (key, value))
    scores = torch.bmm(q, k.transpose(1, 2)).float().view(-1, groups, heads // groups, length, length) * scale
    hidden = _later(length, query.device) if group.hidden is None else group.hidden[:, None, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(v.dtype)
    out = torch.bmm(weights.view(-1, rows, length), v)
    return (
        out.view(-1, groups, heads // groups, length, v.shape[-1])
        .permute(0, 3, 1, 2, 4)
        .reshape(-1, heads, v.shape[-1])
    )


@functools.lru_cache(maxsize=64)
def _later(length: int, device: torch.device) -> Tensor:
    """What comes after each row, bool [L, L]."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def _flash(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = query.contiguous(), key.contiguous(), value.contiguous()
    offsets, longest = segments.cu_seqlens_q, segments.max_seqlen_q
    out = varlen_attn(q, k, v, offsets, offsets, longest, longest, scale=scale, **_causal_arguments())
    assert isinstance(out, Tensor), "a tuple comes only when more is asked for"
    return out


@functools.cache
def _causal_arguments() -> dict[str, Any]:
    """How this torch's ``varlen_attn`` is told to be causal and that heads may share keys: 2.11 and 2.13 differ.

    Where there is no ``enable_gqa``, fewer key heads than query heads are understood without it.
    """
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}
    return causal | ({"enable_gqa": True} if "enable_gqa" in parameters else {})
