"""Causal attention inside the segments of a packed micro-batch, with rotary positions.

Under context parallelism each rank has the queries of its own tokens, and gathers the keys and values of all.

Shapes in comments: T tokens, K tokens whose keys there are (T or, under context parallelism, all of the pack), H query
heads, G key/value heads, D width of a head, E width of a value (mostly D too), N segments of L queries and M keys.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from vime.platform import current
from vime.training.layers.context import gather_parts
from vime.training.layers.flash import flash_attention
from vime.training.layers.rope import rotate
from vime.training.layers.segments import Cells, SegmentGroup, Segments

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
        self.scale, self.layer = softmax_scale, layer_number

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
        """[T, H, D], [T, G, D], [T, G, E] → [T, H·E]."""
        assert isinstance(packed_seq_params, Segments), "micro-batches are always packed"
        if packed_seq_params.rope is not None:
            query, key = (rotate(x, packed_seq_params.rope) for x in (query, key))
        return attend(query, key, value, packed_seq_params, scale=self.scale, layer=self.layer).flatten(1)


def attend(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scale: float | None = None, layer: int = 0
) -> Tensor:
    """Causal attention of each segment to itself, [T, H, D], [T, G, D], [T, G, E] → [T, H, E].

    ``scale`` defaults to D^-½. ``layer`` is its number in the model. Under context parallelism it is collective.
    """
    if segments.part is not None and segments.part.group is not None:
        both = gather_parts(torch.cat((key, value), dim=-1), segments.part.group)
        key, value = both.tensor_split((key.shape[-1],), dim=-1)
    if current().segment_kernel and query.dtype in (torch.bfloat16, torch.float16):
        return _flash(query, key, value, segments, scale, layer)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    groups = segments.groups
    if len(groups) == 1 and groups[0].whole:
        return _attend_group(query, key, value, groups[0], scale)
    queries, keys = [group.queries for group in groups], [group.keys for group in groups]
    once = segments.part is None
    batches = zip(groups, _gather(query, queries), _gather(key, keys, once), _gather(value, keys, once), strict=True)
    return _scatter(queries, [_attend_group(q, k, v, group, scale) for group, q, k, v in batches])


def _gather(x: Tensor, cells: Sequence[Cells], once: bool = True) -> tuple[Tensor, ...]:
    """[T, …] → the rows of each group, [N·L, …]; ``once``: each token has exactly one cell."""
    rows: tuple[Tensor, ...] = _Gather.apply(x, cells, once)  # type: ignore[no-untyped-call]
    return rows


def _scatter(cells: Sequence[Cells], outputs: list[Tensor]) -> Tensor:
    tokens: Tensor = _Scatter.apply(cells, *outputs)  # type: ignore[no-untyped-call]
    return tokens


class _Gather(torch.autograd.Function):
    """Backward only copies where each token has one cell; where it has any number of them, it adds up in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cells: Sequence[Cells], once: bool) -> tuple[Tensor, ...]:
        ctx.cells, ctx.once, ctx.tokens = cells, once, len(x)
        return tuple(x.index_select(0, each.index) for each in cells)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if ctx.once:
            return _tokens_of(ctx.cells, gradients), None, None
        total = gradients[0].new_zeros(ctx.tokens, *gradients[0].shape[1:], dtype=torch.float32)
        for cells, values in zip(ctx.cells, gradients, strict=True):
            total.index_add_(0, cells.tokens, values.index_select(0, cells.filled).float())
        return total.to(gradients[0].dtype), None, None


class _Scatter(torch.autograd.Function):
    """The rows of each group → [T, …]; what padding cells hold is dropped and gets no gradient."""

    @staticmethod
    def forward(ctx: Any, cells: Sequence[Cells], *outputs: Tensor) -> Tensor:
        ctx.cells = cells
        return _tokens_of(cells, outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        return None, *(_rows_of(cells, gradient) for cells in ctx.cells)


def _tokens_of(cells: Sequence[Cells], rows: tuple[Tensor, ...]) -> Tensor:
    out = rows[0].new_empty(sum(len(each.tokens) for each in cells), *rows[0].shape[1:])
    for each, values in zip(cells, rows, strict=True):
        out.index_copy_(0, each.tokens, values.index_select(0, each.filled))
    return out


def _rows_of(cells: Cells, tokens: Tensor) -> Tensor:
    rows = tokens.new_zeros(len(cells.index), *tokens.shape[1:])
    return rows.index_copy_(0, cells.filled, tokens.index_select(0, cells.tokens))


def _attend_group(query: Tensor, key: Tensor, value: Tensor, group: SegmentGroup, scale: float) -> Tensor:
    """[N·L, H, D], [N·M, G, D], [N·M, G, E] → [N·L, H, E]."""
    if group.keys.length <= DIRECT_LENGTH:
        return _direct(query, key, value, group, scale)
    q = query.view(-1, group.queries.length, *query.shape[1:]).transpose(1, 2)
    k, v = (x.view(-1, group.keys.length, *x.shape[1:]).transpose(1, 2) for x in (key, value))
    seen = None if group.hidden is None else ~group.hidden[:, None]
    shared = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, scale=scale, enable_gqa=shared)
    return out.transpose(1, 2).flatten(0, 1)


def _direct(query: Tensor, key: Tensor, value: Tensor, group: SegmentGroup, scale: float) -> Tensor:
    """Softmax of the whole L·M scores of each head, in float32. The heads of a group share their keys as more rows."""
    length, columns = group.queries.length, group.keys.length
    heads, groups = query.shape[1], key.shape[1]
    rows = heads // groups * length
    q_nghld = query.view(-1, length, groups, heads // groups, query.shape[-1]).permute(0, 2, 3, 1, 4)
    q = q_nghld.reshape(-1, rows, query.shape[-1])
    k, v = (x.view(-1, columns, groups, x.shape[-1]).transpose(1, 2).flatten(0, 1) for x in (key, value))
    scores = torch.bmm(q, k.transpose(1, 2)).float().view(-1, groups, heads // groups, length, columns) * scale
    hidden = _later(length, query.device) if group.hidden is None else group.hidden[:, None, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(v.dtype)
    out = torch.bmm(weights.view(-1, rows, columns), v)
    return (
        out.view(-1, groups, heads // groups, length, v.shape[-1])
        .permute(0, 3, 1, 2, 4)
        .reshape(-1, heads, v.shape[-1])
    )


@functools.lru_cache(maxsize=64)
def _later(length: int, device: torch.device) -> Tensor:
    """What comes after each row, bool [L, L]."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def _flash(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None, layer: int) -> Tensor:
    """The kernel lets the last query of a segment see its last key, so fewer queries than keys are the last ones."""
    if segments.part is not None:
        key, value = (_gather(x, (segments.keys_of_runs,), once=False)[0] for x in (key, value))
    width = value.shape[-1]
    if width < key.shape[-1]:
        value = F.pad(value, (0, key.shape[-1] - width))  # the kernel wants them as wide as the keys
    q, k, v = query.contiguous(), key.contiguous(), value.contiguous()
    offsets = segments.cu_seqlens_q, segments.cu_seqlens_kv
    longest = segments.max_seqlen_q, segments.max_seqlen_kv
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = flash_attention(q, k, v, offsets, longest, scale, layer=layer, kept=segments.kept)
    return out[..., :width]
