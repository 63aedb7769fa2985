"""Layers of a kind of their own, in the layouts that cut them: latent attention, norms on both sides."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from tests.training.layouts import FP32, LAYOUTS, Matrix, Row, _of
from tests.training.test_expert_layouts import routes_by_token
from tests.training.test_layouts import PER_SAMPLE

LAYOUTS.setdefault("tp2 sp etp2", _of(2, tp=2, sp=True, etp=2))
ROWS = {
    # A bias that all keys share hardly changes a softmax: its gradient is mostly rounding, and so is Adam's step.
    "glm4": Row(
        family="glm4",
        flags=["--fp32", *PER_SAMPLE],
        layouts=("tp2 sp", "pp2", "cp2"),
        tolerance=dataclasses.replace(FP32, update=2e-2),
    ),
    "deepseek_v3": Row(
        family="deepseek_v3",
        flags=["--fp32", *PER_SAMPLE],
        layouts=("tp2 sp etp2", "pp2", "cp2", "ep2"),
        around=routes_by_token,
    ),
}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    yield Matrix(ROWS, tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize(("row", "layout"), [(row, each) for row in ROWS for each in ROWS[row].layouts])
def test_a_layout_changes_no_number(row: str, layout: str, matrix: Matrix) -> None:
    assert not matrix.deviation(row, layout).exceeded(ROWS[row].tolerance)
