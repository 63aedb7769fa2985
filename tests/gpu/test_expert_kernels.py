"""The kernels of experts against the same in float64: ragged sizes, idle experts, tokens that have too few."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

if TYPE_CHECKING:
    from vime.training.kernels.grouped import Tile

pytest.importorskip("triton", reason="Triton is installed with torch for GPUs only")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-6  # relative, float32 against float64
COUNTS = [[0, 1, 70, 0, 33], [104, 0, 0, 0, 0], [0, 0, 0, 0, 0], [16, 32, 48, 64, 16]]


def far(found: Tensor, expected: Tensor) -> float:
    """Relative distance."""
    return float((found.detach().double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def parts(x: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
    return x[: sum(counts)].double().split(counts)


def matrices(count: int, rows: int, columns: int, dtype: torch.dtype, *, aligned: bool) -> list[Tensor]:
    """Separate ones, that begin at multiples of 16 bytes or one element behind."""
    made = [torch.randn(1 + rows * columns, device=DEVICE, dtype=dtype) for _ in range(count)]
    return [(each[:-1] if aligned else each[1:]).view(rows, columns) for each in made]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (40, 72)], ids=["whole tiles", "parts of tiles"])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "anywhere"])
def test_products_of_experts(counts: list[int], outputs: int, inputs: int, aligned: bool) -> None:
    from vime.training.kernels.grouped import Tile

    check_products(counts, outputs, inputs, torch.float32, (Tile(16, 32, 16, warps=4),) * 2, TOLERANCE, aligned)


def test_products_in_wide_tiles() -> None:
    """Which are written piece by piece."""
    from vime.training.kernels.grouped import Tile

    check_products(COUNTS[0], 40, 200, torch.float32, (Tile(16, 32, 16), Tile(16, 128, 16)), TOLERANCE, True)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter would take minutes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "anywhere"])
def test_products_in_the_tiles_that_are_used(dtype: torch.dtype, aligned: bool) -> None:
    from vime.training.kernels.grouped import gradient_tile, product_tile

    tolerance = 2e-6 if dtype is torch.float32 else 4e-3
    counts = [0, 1, 700, 0, 333, 128]
    check_products(counts, 512, 320, dtype, (product_tile(dtype), gradient_tile(dtype)), tolerance, aligned)


def check_products(
    counts: list[int],
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    tiles: tuple[Tile, Tile],
    tolerance: float,
    aligned: bool,
) -> None:
    """All that is multiplied by or added to weights, of which nobody wants the second one's gradient."""
    from vime.training.kernels.grouped import (
        Addresses,
        Groups,
        grouped_product,
        grouped_product_transposed,
        grouped_weight_gradients,
    )

    known = sum(counts)
    rows = known + 3  # some rows belong to nobody
    weights = matrices(len(counts), outputs, inputs, dtype, aligned=aligned)
    x = torch.randn(rows, inputs, device=DEVICE, dtype=dtype)
    dy = torch.randn(rows, outputs, device=DEVICE, dtype=dtype)
    groups = Groups.of(torch.tensor(counts, device=DEVICE), rows, tiles[0])
    table = Addresses().of(weights)
    assert table.alignment == (16 if aligned else 1)
    y = grouped_product(x, table, outputs, groups, tiles[0])
    expected = torch.cat([part @ w.double().t() for part, w in zip(parts(x, counts), weights, strict=True)])
    assert far(y[:known], expected) < tolerance
    dx = grouped_product_transposed(dy, table, inputs, groups, tiles[0])
    expected = torch.cat([part @ w.double() for part, w in zip(parts(dy, counts), weights, strict=True)])
    assert far(dx[:known], expected) < tolerance
    for add in (False, True):
        kind = torch.float32 if add else dtype
        totals = matrices(len(counts), outputs, inputs, kind, aligned=aligned)
        before = [total.clone() for total in totals]
        targets = Addresses().of([None if i == 1 else total for i, total in enumerate(totals)])
        grouped_weight_gradients(dy, x, targets, groups, dtype=kind, add=add, tile=tiles[1])
        assert torch.equal(totals[1], before[1])
        for i, (one, other) in enumerate(zip(parts(dy, counts), parts(x, counts), strict=True)):
            if i != 1:
                assert far(totals[i], before[i].double() * add + one.t() @ other) < tolerance


def test_addresses_follow_their_tensors() -> None:
    from vime.training.kernels.grouped import Addresses, Table

    tensors = [torch.zeros(8, device=DEVICE) for _ in range(2)]
    addresses = Addresses()
    first = addresses.of(tensors)
    assert addresses.of(tensors) is first
    tensors[1].data = torch.zeros(8, device=DEVICE)
    assert addresses.of(tensors).addresses.tolist() == [tensor.data_ptr() for tensor in tensors]
    stacked = torch.zeros(3, 2, 4, device=DEVICE)
    assert Table.of_slices(stacked).addresses.tolist() == [each.data_ptr() for each in stacked]


def test_weighted_activation() -> None:
    from vime.training.kernels.swiglu import weighted_swiglu, weighted_swiglu_gradients

    x, weights, dy = (torch.randn(size, device=DEVICE) for size in ((7, 600), (7,), (7, 300)))
    exact, exact_weights = x.double().requires_grad_(), weights.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up * exact_weights[:, None]
    d_exact, d_weights = torch.autograd.grad(expected[:5], [exact, exact_weights], dy[:5].double())
    dx, dw, y = weighted_swiglu_gradients(dy, x, weights, torch.tensor(5, device=DEVICE))
    assert far(weighted_swiglu(x, weights), expected.detach()) < TOLERANCE
    assert far(y[:5], expected[:5].detach()) < TOLERANCE
    assert far(dx[:5], d_exact[:5]) < TOLERANCE
    assert far(dw, d_weights) < TOLERANCE  # with zeros behind the last row


@pytest.mark.parametrize("full", [True, False], ids=["each token has its experts", "some have fewer"])
def test_tokens_go_to_the_rows_of_their_experts_and_back(full: bool) -> None:
    from vime.training.kernels.permute import collect, places_of, spread

    tokens, experts, top_k, width = 37, 6, 3, 40
    chosen = torch.zeros(tokens, experts, dtype=torch.bool)
    for token in range(tokens):
        chosen[token, torch.randperm(experts)[: top_k if full else token % (top_k + 1)]] = True
    chosen = chosen.to(DEVICE)
    pairs, rows = places_of(chosen, top_k)
    of_row = [(int(n), int(e)) for e, n in chosen.t().nonzero()]  # sorted by expert, then by token
    assert [divmod(int(pair), experts) for pair in pairs[: len(of_row)]] == of_row
    sources = pairs // experts
    x = torch.randn(tokens, width, device=DEVICE, requires_grad=True)
    spread_x = spread(x, sources, rows)
    assert torch.equal(spread_x[: len(of_row)], x[[n for n, _ in of_row]])
    factors = torch.randn(tokens * top_k, 1, device=DEVICE)
    y = collect(spread_x * factors, sources, rows)
    total = torch.zeros(tokens, 1, dtype=torch.float64)
    for row, (n, _) in enumerate(of_row):
        total[n] += float(factors[row])
    assert far(y, x.detach().double() * total.to(DEVICE)) < TOLERANCE
    gradient = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, x, gradient)
    assert far(found, gradient.double() * total.to(DEVICE)) < TOLERANCE
