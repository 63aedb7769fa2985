"""Products of rows with the weights of their experts: one launch for all experts, however many rows each has.

The weights are separate tensors wherever they lie: kernels read their addresses. Nothing here waits for the device.

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

__all__ = [
    "Addresses",
    "Groups",
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
    described: bool = False  # loaded by descriptors of the matrices (Hopper's TMA) instead of an address an element


PRODUCT = Tile(128, 256, 64)
GRADIENT = Tile(128, 128, 64, warps=4)
"""The fastest on an H200 for 128 experts of 2048 × 768 channels and 16k tokens (``python -m bench.h200.moe --micro``).
Two programs of the smaller tile share a multiprocessor: one multiplies while the other adds to gradients."""
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
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (COLUMNS_IN_ALL + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // blocks
    expert = tl.load(tiles + tile * 3)
    first = tl.load(tiles + tile * 3 + 1)
    end = tl.load(tiles + tile * 3 + 2)
    if first < end:
        weight = tl.load(addresses + expert).to(tl.pointer_type(x.dtype.element_ty))
        weight = tl.multiple_of(weight, 16)
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
def _product_described(
    x, addresses, y, tiles, rows, COLUMNS_IN_ALL: tl.constexpr, DEPTH_IN_ALL: tl.constexpr, TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (COLUMNS_IN_ALL + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // blocks
    expert = tl.load(tiles + tile * 3)
    first = tl.load(tiles + tile * 3 + 1)
    end = tl.load(tiles + tile * 3 + 2)
    if first < end:
        weight = tl.load(addresses + expert).to(tl.pointer_type(x.dtype.element_ty))
        left = tl.make_tensor_descriptor(x, [rows, DEPTH_IN_ALL], [DEPTH_IN_ALL, 1], [ROWS, DEPTH])
        if TRANSPOSED:
            right = tl.make_tensor_descriptor(
                weight, [DEPTH_IN_ALL, COLUMNS_IN_ALL], [COLUMNS_IN_ALL, 1], [DEPTH, COLUMNS]
            )
        else:
            right = tl.make_tensor_descriptor(
                weight, [COLUMNS_IN_ALL, DEPTH_IN_ALL], [DEPTH_IN_ALL, 1], [COLUMNS, DEPTH]
            )
        column = tl.program_id(0) % blocks * COLUMNS
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for start in range(0, DEPTH_IN_ALL, DEPTH):
            a = left.load([first, start])
            if TRANSPOSED:
                b = right.load([start, column])
            else:
                b = right.load([column, start]).T
            total = tl.dot(a, b, total, input_precision="ieee")
        row = first + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        y_at = y + row.to(tl.int64)[:, None] * COLUMNS_IN_ALL + columns[None]
        tl.store(y_at, total.to(y.dtype.element_ty), mask=(row < end)[:, None] & (columns < COLUMNS_IN_ALL)[None])


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
    ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
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
        gradient = tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)
        _write(gradient, total, output, block % across * COLUMNS, OUTPUTS, INPUTS, ADD)


@triton.jit
def _weight_gradient_described(
    dy, x, addresses, order, counts, ends, rows, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, TYPE: tl.constexpr,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
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
        first_output = block // across * ROWS
        first_column = block % across * COLUMNS
        left = tl.make_tensor_descriptor(dy, [rows, OUTPUTS], [OUTPUTS, 1], [DEPTH, ROWS])
        right = tl.make_tensor_descriptor(x, [rows, INPUTS], [INPUTS, 1], [DEPTH, COLUMNS])
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        last = end - count % DEPTH
        for start in range(end - count, last, DEPTH):
            a = left.load([start, first_output])
            b = right.load([start, first_column])
            total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
        if last < end:  # what follows are rows of another expert
            there = (last + tl.arange(0, DEPTH) < end)[:, None]
            a = tl.where(there, left.load([last, first_output]), 0.0)
            b = tl.where(there, right.load([last, first_column]), 0.0)
            total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
        gradient = tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)
        _write(gradient, total, first_output + tl.arange(0, ROWS), first_column, OUTPUTS, INPUTS, ADD)


def _room(size: int, alignment: int, stream: int | None) -> Tensor:
    """Where a launch keeps its descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def grouped_product(x: Tensor, addresses: Tensor, outputs: int, groups: Groups, tile: Tile) -> Tensor:
    """Each row of x [R, I] times the transposed weight [O, I] of its expert → [R, O] of x's type.

    Rows behind those of the last expert are left as they come.

    Args:
        addresses: int64 [E], of contiguous weights of x's type, each a multiple of 16 bytes.
        groups: made for tiles of as many rows as ``tile`` has.
    """
    return _launch_product(x, addresses, outputs, groups, tile, transposed=False)


def grouped_product_transposed(dy: Tensor, addresses: Tensor, inputs: int, groups: Groups, tile: Tile) -> Tensor:
    """Each row of dy [R, O] times the weight [O, I] of its expert → [R, I]; the rest as ``grouped_product`` has it."""
    return _launch_product(dy, addresses, inputs, groups, tile, transposed=True)


def _launch_product(
    x: Tensor, addresses: Tensor, columns: int, groups: Groups, tile: Tile, *, transposed: bool
) -> Tensor:
    assert groups.height == tile.rows and x.is_contiguous(), (groups.height, tile, x.stride())
    y = x.new_empty(len(x), columns)
    grid: Any = (len(groups.tiles) * triton.cdiv(columns, tile.columns),)
    if tile.described:
        triton.set_allocator(_room)  # for this thread: gradients have one of their own
        _product_described[grid](
            x, addresses, y, groups.tiles, len(x), columns, x.shape[1], transposed,
            tile.rows, tile.columns, tile.depth, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return y
    _product[grid](
        x, addresses, y, groups.tiles, columns, x.shape[1], transposed,
        tile.rows, tile.columns, tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def grouped_weight_gradients(
    dy: Tensor, x: Tensor, addresses: Tensor, groups: Groups, *, dtype: torch.dtype, add: bool, tile: Tile
) -> None:
    """For each expert ``dy^T x`` of its rows of dy [R, O] and x [R, I], written to or added to a tensor [O, I].

    Sums are float32, in an order that the groups alone decide.

    Args:
        addresses: int64 [E], of contiguous tensors of ``dtype``, multiples of 16 bytes; 0: not for this expert.
        add: to what is there. Otherwise an expert without rows gets zeros.
    """
    assert dy.is_contiguous() and x.is_contiguous(), (dy.stride(), x.stride())
    order = groups.counts.argsort(descending=True)  # the longest first, so that the last programs are short
    outputs, inputs = dy.shape[1], x.shape[1]
    blocks = triton.cdiv(outputs, tile.rows) * triton.cdiv(inputs, tile.columns)
    grid: Any = (len(order) * blocks,)
    if tile.described:
        triton.set_allocator(_room)
        _weight_gradient_described[grid](
            dy, x, addresses, order, groups.counts, groups.ends, len(x), outputs, inputs, TYPES[dtype], add,
            tile.rows, tile.columns, tile.depth, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return
    _weight_gradient[grid](
        dy, x, addresses, order, groups.counts, groups.ends, outputs, inputs, TYPES[dtype], add,
        tile.rows, tile.columns, tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


class Addresses:
    """Where tensors lie, as kernels read it; looked up again each time, because weights leave a device and return."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self._on_device: Tensor | None = None

    def of(self, tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
        """int64 [len(tensors)]; 0 for None."""
        places = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        if self._on_device is None or places != self._places:
            assert not any(place % 16 for place in places), "tensors begin at multiples of 16 bytes"
            self._places, self._on_device = places, torch.tensor(places, dtype=torch.int64, device=device)
        return self._on_device
