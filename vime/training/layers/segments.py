"""Which tokens of a packed micro-batch belong together, in the forms that the layers want.

A segment is a piece of the pack that attends to nothing outside itself. Mostly it is one sample. Samples with the same
prompt may share it: such a segment is a tree, the prompt and then the responses one after the other, each of which
sees the prompt and itself. The branches are computed exactly as if each had the prompt for itself.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from vime.training.layers.rope import RopeTable

__all__ = ["SegmentGroup", "Segments", "Tree", "group_segments"]

MAX_WASTE = 0.25
"""Segments share a group as long as no more than this part of the group's cells is padding."""

Tree: TypeAlias = tuple[int, ...]
"""Tokens of the stem and of each branch. A sample that shares nothing is a stem alone."""


@dataclass(frozen=True, slots=True, eq=False)
class SegmentGroup:
    """n segments of about the same length, to be computed as one batch of ``length`` rows each.

    A short segment is padded at its end, where no token looks: causality forbids it.
    """

    length: int
    cells: Tensor  # int64 [n * length], the token of each cell; padding repeats the last token of its segment
    filled: Tensor  # int64 [tokens], the cells that hold tokens
    tokens: Tensor  # int64 [tokens], the token of each filled cell
    hidden: Tensor | None  # bool [n, length, length], what a row must not see; None: what comes after it
    whole: bool  # the group is the pack as it lies: full, and in the pack's order


@dataclass
class Segments(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a packed batch, with what vime's layers need besides."""

    trees: tuple[Tree, ...] = ()  # of each segment, on the host
    rope: RopeTable | None = field(default=None, repr=False)

    @classmethod
    def of(cls, trees: tuple[Tree, ...], device: torch.device) -> Segments:
        """Describes segments of these shapes, in the order of the pack."""
        lengths = [sum(tree) for tree in trees]
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            trees=trees,
        )

    @property
    def groups(self) -> tuple[SegmentGroup, ...]:
        assert self.cu_seqlens_q is not None
        return group_segments(self.trees, self.cu_seqlens_q.device)


@functools.lru_cache(maxsize=64)
def group_segments(trees: tuple[Tree, ...], device: torch.device) -> tuple[SegmentGroup, ...]:
    """Puts segments of similar length together, longest first; trees with branches apart from the others."""
    lengths = [sum(tree) for tree in trees]
    groups: list[list[int]] = []
    for segment in sorted(range(len(trees)), key=lambda i: (len(trees[i]) > 1, -lengths[i])):
        if groups and _alike(trees, [*groups[-1], segment]):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return tuple(_group(sorted(members), trees, device) for members in groups)


def _alike(trees: tuple[Tree, ...], members: list[int]) -> bool:
    """Whether these segments, longest first, make a group without much padding."""
    first, last = trees[members[0]], trees[members[-1]]
    padding = 1 - sum(sum(trees[i]) for i in members) / (len(members) * sum(first))
    return padding <= MAX_WASTE and (len(first) > 1) == (len(last) > 1)


def _group(members: list[int], trees: tuple[Tree, ...], device: torch.device) -> SegmentGroup:
    starts = [0, *accumulate(sum(tree) for tree in trees)]
    first = torch.tensor([starts[i] for i in members])
    lengths = torch.tensor([starts[i + 1] - starts[i] for i in members])
    row = torch.arange(int(lengths.max()))
    cells = (first[:, None] + torch.minimum(row, lengths[:, None] - 1)).flatten()
    filled = (row < lengths[:, None]).flatten().nonzero().flatten()
    branched = len(trees[members[0]]) > 1
    hidden = torch.stack([_hidden(trees[i], len(row)) for i in members]).to(device) if branched else None
    whole = torch.equal(cells, torch.arange(starts[-1]))
    return SegmentGroup(len(row), cells.to(device), filled.to(device), cells[filled].to(device), hidden, whole)


def _hidden(tree: Tree, length: int) -> Tensor:
    """What each row of a tree, padded to ``length``, must not see: later rows, and rows of other branches."""
    padding = length - sum(tree)
    part = torch.arange(len(tree) + 1).repeat_interleave(torch.tensor([*tree, padding]))  # 0: the stem
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    return later | ((part[None] != 0) & (part[None] != part[:, None]))
