"""Two GPUs share a model over NCCL and compute what one does. ``bench.h200.layouts`` goes through all layouts."""

from __future__ import annotations

import dataclasses

import pytest

from bench.h200.layouts import ROWS
from tests.training.layouts import Matrix

CHOSEN = {
    "fp32, untied": ["dp2 do overlap", "tp2 sp", "pp2 vpp2", "cp2"],
    "fp32, tied": ["tp2 sp", "pp2"],
    "fp32, experts": ["ep2", "tp2 sp ep2"],
    "bf16, untied": ["dp2 do overlap", "tp2 sp", "pp2", "cp2"],
}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    rows = {name: dataclasses.replace(ROWS[name], layouts=layouts) for name, layouts in CHOSEN.items()}
    return Matrix(rows, tmp_path_factory.mktemp("layouts"))


@pytest.mark.two_gpus
@pytest.mark.parametrize(("row", "layout"), [(row, layout) for row in CHOSEN for layout in CHOSEN[row]])
def test_two_gpus_compute_what_one_does(row: str, layout: str, matrix: Matrix) -> None:
    assert not matrix.deviation(row, layout).exceeded(ROWS[row].tolerance)
