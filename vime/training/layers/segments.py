"""Which tokens of a packed micro-batch belong together, in the forms that the layers want.

A segment is a piece of the pack that attends to nothing outside itself. Mostly it is one sample. Samples with the same
prompt may share it: such a segment is a tree, the prompt and then the responses one after the other, each of which
sees the prompt and itself. The branches are computed exactly as if each had the prompt for itself.

Under context parallelism a rank has only a part of the pack as queries, and the keys of all of it. What it has of a
segment is one run of neighbouring tokens, or two; a run sees the segment from its start up to the run's end.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from vime.training.layers.context import ContextPart
from vime.training.layers.flash import Kept
from vime.training.layers.rope import RopeTable
from vime.training.replay import Routes

__all__ = ["Cells", "SegmentGroup", "Segments", "Tree", "group_runs", "group_segments"]

MAX_WASTE = 0.25
"""Segments share a group as long as no more than this part of the group's cells is padding."""

Tree: TypeAlias = tuple[int, ...]
"""Tokens of the stem and of each branch. A sample that shares nothing is a stem alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """n rows of ``length`` cells for the tokens of n segments.

    A short segment is padded at its end, where no token looks: causality forbids it.
    """

    length: int
    index: Tensor  # int64 [n * length], the token of each cell; padding repeats the last token of its row
    filled: Tensor  # int64 [tokens], the cells that hold tokens
    tokens: Tensor  # int64 [tokens], the token of each filled cell

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int]], device: torch.device) -> Cells:
        """One row for each span, given by its first token and the number of its tokens (at least one)."""
        first, lengths = torch.tensor(spans).unbind(1)
        column = torch.arange(int(lengths.max()))
        index = (first[:, None] + torch.minimum(column, lengths[:, None] - 1)).flatten()
        filled = (column < lengths[:, None]).flatten().nonzero().flatten()
        return cls(len(column), index.to(device), filled.to(device), index[filled].to(device))


@dataclass(frozen=True, slots=True, eq=False)
class SegmentGroup:
    """Segments of about the same length, to be computed as one batch."""

    queries: Cells
    keys: Cells  # the same object without context parallelism
    hidden: Tensor | None  # bool [n, queries, keys], what a query must not see; None: what comes after it
    whole: bool  # the group is the pack as it lies: full, and in the pack's order


class Run(NamedTuple):
    """Neighbouring tokens of one segment in a rank's part of the pack, and the keys from the segment's start on."""

    query: int  # the first one's place in the part
    queries: int
    key: int  # the first token of the segment, in the pack
    keys: int  # up to the last query


@dataclass
class Segments(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a packed batch, with what vime's layers need besides.

    The offsets are those of the segments; under context parallelism, of the runs of this rank and of their keys.
    """

    trees: tuple[Tree, ...] = ()  # of each segment of the whole pack, on the host
    rope: RopeTable | None = field(default=None, repr=False)  # of the tokens that this rank has
    kept: Kept | None = field(default=None, repr=False)  # of attention, while layers wait to be computed again
    part: ContextPart | None = None  # under context parallelism
    routes: Routes | None = field(default=None, repr=False)  # which experts to choose; None: routers choose freely
    filling: Tensor | None = None  # bool, which of this rank's tokens only fill the pack; None: none do

    @classmethod
    def of(cls, trees: tuple[Tree, ...], device: torch.device, part: ContextPart | None = None) -> Segments:
        """Describes segments of these shapes, in the order of the pack."""
        if part is None:
            queries = keys = [sum(tree) for tree in trees]
        else:
            runs = _runs(trees, part)
            queries, keys = [run.queries for run in runs], [run.keys for run in runs]
        return cls(
            qkv_format="thd",
            cu_seqlens_q=_offsets(queries, device),
            cu_seqlens_kv=_offsets(keys, device),
            max_seqlen_q=max(queries),
            max_seqlen_kv=max(keys),
            trees=trees,
            part=part,
        )

    @property
    def groups(self) -> tuple[SegmentGroup, ...]:
        if self.part is not None:
            return group_runs(self.trees, self.part, self._device)
        return group_segments(self.trees, self._device)

    @property
    def keys_of_runs(self) -> Cells:
        """Under context parallelism: the keys of the first run, then those of the second, …, in a single row."""
        assert self.part is not None
        return _keys_of_runs(self.trees, self.part, self._device)

    @property
    def _device(self) -> torch.device:
        assert self.cu_seqlens_q is not None
        device: torch.device = self.cu_seqlens_q.device
        return device


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)


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
    cells = Cells.of([(starts[i], sum(trees[i])) for i in members], device)
    branched = len(trees[members[0]]) > 1
    hidden = torch.stack([_hidden(trees[i], cells.length) for i in members]).to(device) if branched else None
    whole = torch.equal(cells.index, torch.arange(starts[-1], device=device))
    return SegmentGroup(cells, cells, hidden, whole)


def _hidden(tree: Tree, length: int) -> Tensor:
    """What each row of a tree, padded to ``length``, must not see: later rows, and rows of other branches."""
    padding = length - sum(tree)
    part = torch.arange(len(tree) + 1).repeat_interleave(torch.tensor([*tree, padding]))  # 0: the stem
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    return later | ((part[None] != 0) & (part[None] != part[:, None]))


@functools.lru_cache(maxsize=64)
def group_runs(trees: tuple[Tree, ...], part: ContextPart, device: torch.device) -> tuple[SegmentGroup, ...]:
    """Puts runs together that have about as many queries and as many keys, longest first.

    The groups' keys are numbered as they lie when the parts of all ranks stand one after the other.
    """
    places = part.places(sum(map(sum, trees))).to(device)
    groups: list[list[Run]] = []
    for run in sorted(_runs(trees, part), key=lambda run: (-run.queries, -run.keys)):
        if groups and _waste([*groups[-1], run]) <= MAX_WASTE:
            groups[-1].append(run)
        else:
            groups.append([run])
    return tuple(_group_of_runs(members, places, device) for members in groups)


def _runs(trees: tuple[Tree, ...], part: ContextPart) -> list[Run]:
    assert all(len(tree) == 1 for tree in trees), "samples share no prompt under context parallelism"
    starts = [0, *accumulate(sum(tree) for tree in trees)]
    runs = []
    at = 0
    for mine in part.ranges(starts[-1]):
        for start, stop in pairwise(starts):
            first, last = max(start, mine.start), min(stop, mine.stop)
            if first < last:
                runs.append(Run(at + first - mine.start, last - first, start, last - start))
        at += len(mine)
    return runs


def _waste(runs: list[Run]) -> float:
    """The part of the group's scores that would be padding."""
    rows, columns = max(run.queries for run in runs), max(run.keys for run in runs)
    return 1 - sum(run.queries * run.keys for run in runs) / (len(runs) * rows * columns)


def _group_of_runs(runs: list[Run], places: Tensor, device: torch.device) -> SegmentGroup:
    queries = Cells.of([(run.query, run.queries) for run in runs], device)
    keys = Cells.of([(run.key, run.keys) for run in runs], device)
    before = torch.tensor([run.keys - run.queries for run in runs])  # keys that every query of the run sees
    last = before[:, None] + torch.arange(queries.length)  # what each query sees, up to itself
    hidden = torch.arange(keys.length) > last[:, :, None]
    placed = Cells(keys.length, places[keys.index], keys.filled, places[keys.tokens])
    return SegmentGroup(queries, placed, hidden.to(device), whole=False)


@functools.lru_cache(maxsize=64)
def _keys_of_runs(trees: tuple[Tree, ...], part: ContextPart, device: torch.device) -> Cells:
    places = part.places(sum(map(sum, trees)))
    tokens = torch.cat([places[run.key : run.key + run.keys] for run in _runs(trees, part)]).to(device)
    return Cells(len(tokens), tokens, torch.arange(len(tokens), device=device), tokens)
