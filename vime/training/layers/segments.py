"""Which tokens of a packed micro-batch belong together, in the forms that the layers want.

Samples stand one after the other without padding ("thd"). A segment is one sample; attention never crosses segments.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from vime.training.layers.rope import RopeTable

__all__ = ["SegmentGroup", "Segments", "group_segments"]

MAX_WASTE = 0.25
"""Segments share a group as long as no more than this part of the group's cells is padding."""


@dataclass(frozen=True, slots=True, eq=False)
class SegmentGroup:
    """n segments of about the same length, to be computed as one batch of ``length`` rows each.

    A short segment is padded at its end. Causal attention never looks there, so no mask is needed.
    """

    length: int
    cells: Tensor  # int64 [n * length], the token of each cell; padding repeats the last token of its segment
    filled: Tensor  # int64 [tokens], the cells that hold tokens
    tokens: Tensor  # int64 [tokens], the token of each filled cell
    whole: slice | None  # the tokens as a slice, when the group is full and its tokens are consecutive


@dataclass
class Segments(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a packed batch, with what vime's layers need besides."""

    lengths: tuple[int, ...] = ()  # tokens of each segment, on the host
    rope: RopeTable | None = field(default=None, repr=False)

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> Segments:
        """Describes segments of these lengths."""
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)
        longest = max(lengths)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=lengths,
        )

    @property
    def groups(self) -> tuple[SegmentGroup, ...]:
        assert self.cu_seqlens_q is not None
        return group_segments(self.lengths, self.cu_seqlens_q.device)


@functools.lru_cache(maxsize=64)
def group_segments(lengths: tuple[int, ...], device: torch.device) -> tuple[SegmentGroup, ...]:
    """Puts segments of similar length together, longest first."""
    starts = [0, *accumulate(lengths)]
    by_length = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for segment in by_length:
        if groups and _padding(lengths, [*groups[-1], segment]) <= MAX_WASTE:
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return tuple(_group(sorted(members), starts, device) for members in groups)


def _padding(lengths: tuple[int, ...], members: list[int]) -> float:
    """The part of the cells that would be padding."""
    cells = len(members) * lengths[members[0]]
    return 1 - sum(lengths[i] for i in members) / cells


def _group(members: list[int], starts: list[int], device: torch.device) -> SegmentGroup:
    lengths = torch.tensor([starts[i + 1] - starts[i] for i in members])
    first = torch.tensor([starts[i] for i in members])
    longest = int(lengths.max())
    row = torch.arange(longest)
    inside = row < lengths[:, None]
    cells = (first[:, None] + torch.minimum(row, lengths[:, None] - 1)).flatten()
    filled = inside.flatten().nonzero().flatten()
    begin, count = int(cells[0]), len(cells)
    whole = slice(begin, begin + count) if torch.equal(cells, torch.arange(begin, begin + count)) else None
    return SegmentGroup(longest, cells.to(device), filled.to(device), cells[filled].to(device), whole)
