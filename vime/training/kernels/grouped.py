"""Products of rows with the weights of their experts: one launch for all experts, however many rows each has.

The weights are separate tensors wherever they lie: kernels read their addresses. The host never waits for the device.

Shapes: R rows sorted by expert, E experts, O outputs and I inputs of a weight [O, I].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vime.platform import current

__all__ = [
    "Addresses",
    "Groups",
    "Table",
    "Tile",
    "gradient_tile",
    "grouped_product",
    "grouped_product_transposed",
    "grouped_weight_gradients",
    "product_tile",
]


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes: ``rows`` × ``columns`` of the result, in steps of ``depth`` along the sum."""

    rows: int
    columns: int
    depth: int
    warps: int = 8
    stages: int = 3


PRODUCT = Tile(128, 256, 64)
GRADIENT = Tile(128, 128, 64, warps=4)
"""The fastest of eight, all in all, on an H200 for 128 experts of 2048 × 768 channels and 16k tokens, while gradients
were still written in one piece (bench/results/h200_moe.json). Two programs of the smaller one share a multiprocessor.
"""
FLOAT32 = Tile(64, 64, 32, warps=4)
"""Sums of float32 have no matrix units: a large tile would not fit the registers."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def product_tile(dtype: torch.dtype) -> Tile:
    return FLOAT32 if dtype is torch.float32 else PRODUCT


def gradient_tile(dtype: torch.dtype) -> Tile:
    return FLOAT32 if dtype is torch.float32 else GRADIENT


@dataclass(frozen=True, slots=True)
class Groups:
    """Which rows belong to which expert, on the device."""

    counts: Tensor  # int64 [E]
    ends: Tensor  # int64 [E]: behind the last row of each
    tiles: Tensor  # int32 [tiles, 3]: expert, first row, end of its rows; nothing to do where first >= end
    height: int  # rows of a tile

    @classmethod
    def of(cls, counts: Tensor, rows: int, tile: Tile) -> Groups:
        """Args: counts int64 [E], on the device; rows, at least their sum, known here without asking the device."""
        ends = counts.cumsum(0)
        tiles = (counts + tile.rows - 1) // tile.rows
        last = tiles.cumsum(0)
        number = torch.arange(triton.cdiv(rows, tile.rows) + len(counts), device=counts.device)
        expert = torch.searchsorted(last, number, right=True).clamp(max=len(counts) - 1)
        first = (ends - counts)[expert] + (number - (last - tiles)[expert]) * tile.rows
        return cls(counts, ends, torch.stack((expert, first, ends[expert]), 1).int(), tile.rows)


@triton.jit
def _product(
    x, addresses, y, tiles, COLUMNS_IN_ALL: tl.constexpr, DEPTH_IN_ALL: tl.constexpr, TRANSPOSED: tl.constexpr,
    ALIGNMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (COLUMNS_IN_ALL + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // blocks
    expert = tl.load(tiles + tile * 3)
    first = tl.load(tiles + tile * 3 + 1)
    end = tl.load(tiles + tile * 3 + 2)
    if first < end:
        weight = tl.load(addresses + expert).to(tl.pointer_type(x.dtype.element_ty))
        weight = tl.multiple_of(weight, ALIGNMENT)
        row = first + tl.arange(0, ROWS)
        column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        # rows behind the end are computed from the last one and not stored: no load needs a mask for them
        x_at = x + tl.minimum(row, end - 1).to(tl.int64)[:, None] * DEPTH_IN_ALL + depth[None]
        if TRANSPOSED:
            w_at = weight + depth[:, None] * COLUMNS_IN_ALL + column[None]
        else:
            w_at = weight + column[None] * DEPTH_IN_ALL + depth[:, None]
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for start in range(0, DEPTH_IN_ALL, DEPTH):
            if DEPTH_IN_ALL % DEPTH == 0 and COLUMNS_IN_ALL % COLUMNS == 0:
                a = tl.load(x_at)
                b = tl.load(w_at)
            else:
                there = depth < DEPTH_IN_ALL - start
                a = tl.load(x_at, mask=there[None], other=0.0)
                b = tl.load(w_at, mask=there[:, None] & (column < COLUMNS_IN_ALL)[None], other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
            x_at += DEPTH
            w_at += DEPTH * COLUMNS_IN_ALL if TRANSPOSED else DEPTH
        y_at = y + row.to(tl.int64)[:, None] * COLUMNS_IN_ALL + column[None]
        tl.store(y_at, total.to(y.dtype.element_ty), mask=(row < end)[:, None] & (column < COLUMNS_IN_ALL)[None])


@triton.jit
def _write(gradient, total, output, column, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, ADD: tl.constexpr):
    """Writes a tile, or adds it, by halves: for the whole and what is there already there are too few registers."""
    if total.shape[1] > 64:
        halves = tl.permute(tl.reshape(total, (total.shape[0], 2, total.shape[1] // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        _write(gradient, left, output, column, OUTPUTS, INPUTS, ADD)
        _write(gradient, right, output, column + total.shape[1] // 2, OUTPUTS, INPUTS, ADD)
    else:
        columns = column + tl.arange(0, total.shape[1])
        at = gradient + output[:, None] * INPUTS + columns[None]
        inside = (output < OUTPUTS)[:, None] & (columns < INPUTS)[None]
        if ADD:
            total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, total.to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def _weight_gradient(
    dy, x, addresses, order, counts, ends, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, TYPE: tl.constexpr,
    ADD: tl.constexpr, ALIGNMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (INPUTS + COLUMNS - 1) // COLUMNS
    blocks: tl.constexpr = across * ((OUTPUTS + ROWS - 1) // ROWS)
    expert = tl.load(order + tl.program_id(0) // blocks)
    address = tl.load(addresses + expert)
    count = tl.load(counts + expert).to(tl.int32)
    needed = address != 0
    if ADD:
        needed = needed & (count > 0)
    if needed:
        end = tl.load(ends + expert).to(tl.int32)
        block = tl.program_id(0) % blocks
        output = block // across * ROWS + tl.arange(0, ROWS)
        column = block % across * COLUMNS + tl.arange(0, COLUMNS)
        row = end - count + tl.arange(0, DEPTH)
        dy_at = dy + row.to(tl.int64)[:, None] * OUTPUTS + output[None]
        x_at = x + row.to(tl.int64)[:, None] * INPUTS + column[None]
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for start in range(0, count, DEPTH):
            there = (row < end - start)[:, None]
            if OUTPUTS % ROWS == 0 and INPUTS % COLUMNS == 0:
                a = tl.load(dy_at, mask=there, other=0.0)
                b = tl.load(x_at, mask=there, other=0.0)
            else:
                a = tl.load(dy_at, mask=there & (output < OUTPUTS)[None], other=0.0)
                b = tl.load(x_at, mask=there & (column < INPUTS)[None], other=0.0)
            total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
            dy_at += DEPTH * OUTPUTS
            x_at += DEPTH * INPUTS
        gradient = tl.multiple_of(address.to(tl.pointer_type(TYPE)), ALIGNMENT)
        _write(gradient, total, output, block % across * COLUMNS, OUTPUTS, INPUTS, ADD)


@dataclass(frozen=True, slots=True)
class Table:
    """Where one tensor of each expert begins."""

    addresses: Tensor  # int64 [E], on the device; 0: nowhere
    alignment: int  # bytes of which all of them are multiples: 16, for the widest loads, or 1

    @classmethod
    def of_slices(cls, stacked: Tensor) -> Table:
        """Of a contiguous tensor [E, ...], whose slices belong to experts."""
        first, size = stacked.data_ptr(), stacked[0].nbytes
        number = torch.arange(len(stacked), device=stacked.device)
        return cls(first + size * number, _alignment((first, size)))


class Addresses:
    """The table of separate tensors; they are looked at each time, because weights leave a device and return."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self._table: Table | None = None

    def of(self, tensors: Sequence[Tensor | None]) -> Table:
        """Args: tensors on the device of this process; None: nowhere."""
        places = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        if self._table is None or places != self._places:
            self._places, self._table = places, Table(current().upload(places), _alignment(places))
        return self._table


def _alignment(places: Sequence[int]) -> int:
    return 1 if any(place % 16 for place in places) else 16


def grouped_product(x: Tensor, weights: Table, outputs: int, groups: Groups, tile: Tile) -> Tensor:
    """Each row of x [R, I] times the transposed weight [O, I] of its expert → [R, O] of x's type.

    Rows behind those of the last expert are left as they come.

    Args:
        weights: contiguous, of x's type.
        groups: made for tiles of as many rows as ``tile`` has.
    """
    return _launch_product(x, weights, outputs, groups, tile, transposed=False)


def grouped_product_transposed(dy: Tensor, weights: Table, inputs: int, groups: Groups, tile: Tile) -> Tensor:
    """Each row of dy [R, O] times the weight [O, I] of its expert → [R, I]; the rest as ``grouped_product`` has it."""
    return _launch_product(dy, weights, inputs, groups, tile, transposed=True)


def _launch_product(x: Tensor, weights: Table, columns: int, groups: Groups, tile: Tile, *, transposed: bool) -> Tensor:
    assert groups.height == tile.rows and x.is_contiguous(), (groups.height, tile, x.stride())
    y = x.new_empty(len(x), columns)
    grid: Any = (len(groups.tiles) * triton.cdiv(columns, tile.columns),)
    _product[grid](
        x, weights.addresses, y, groups.tiles, columns, x.shape[1], transposed, weights.alignment,
        tile.rows, tile.columns, tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def grouped_weight_gradients(
    dy: Tensor, x: Tensor, gradients: Table, groups: Groups, *, dtype: torch.dtype, add: bool, tile: Tile
) -> None:
    """For each expert ``dy^T x`` of its rows of dy [R, O] and x [R, I], written to or added to a tensor [O, I].

    Sums are float32, in an order that the groups alone decide.

    Args:
        gradients: contiguous, of ``dtype``; nowhere: not for this expert.
        add: to what is there. Otherwise an expert without rows gets zeros.
    """
    assert dy.is_contiguous() and x.is_contiguous(), (dy.stride(), x.stride())
    order = groups.counts.argsort(descending=True)  # the longest first, so that the last programs are short
    outputs, inputs = dy.shape[1], x.shape[1]
    blocks = triton.cdiv(outputs, tile.rows) * triton.cdiv(inputs, tile.columns)
    grid: Any = (len(order) * blocks,)
    _weight_gradient[grid](
        dy, x, gradients.addresses, order, groups.counts, groups.ends, outputs, inputs, TYPES[dtype], add,
        gradients.alignment, tile.rows, tile.columns, tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
