"""The layer for multi-token prediction learns the same in every layout, and the policy beside it as well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.training.layouts import LAYOUTS, Matrix, Row, _of
from tests.training.test_expert_layouts import routes_by_token
from tests.training.test_layouts import PER_SAMPLE, PER_TOKEN

LAYOUTS.setdefault("tp2 sp etp2", _of(2, tp=2, sp=True, etp=2))
TRAINED = ["--fp32", "--mtp-num-layers", "1", "--enable-mtp-training"]
ROWS = {
    "glm4_moe, per sample": Row(
        family="glm4_moe",
        flags=[*TRAINED, *PER_SAMPLE],
        layouts=("dp2 do overlap", "tp2 sp etp2", "pp2", "pp2 vpp2 full", "cp2", "ep2"),
        overrides={"num_hidden_layers": 4},
        around=routes_by_token,
        mtp=True,
    ),
}
SLOW_ROWS = {
    "deepseek_v3, per token": Row(
        family="deepseek_v3",
        flags=[*TRAINED, *PER_TOKEN],
        layouts=("dp2 do", "tp2 sp etp1", "pp2 full", "cp2 ep2", "tp2 sp ep2 etp2 do", "pp2 cp2", "pp2 vpp2 cp2"),
        overrides={"num_hidden_layers": 4},
        around=routes_by_token,
        mtp=True,
    ),
    "tied": Row(
        family="glm4_moe",
        flags=[*TRAINED, *PER_TOKEN],
        layouts=("pp2", "tp2 sp etp2", "cp2 do"),
        overrides={"tied": True},
        around=routes_by_token,
        mtp=True,
    ),
}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    yield Matrix(ROWS, tmp_path_factory.mktemp("mtp"))


@pytest.mark.parametrize(("row", "layout"), [(row, each) for row in ROWS for each in ROWS[row].layouts])
def test_a_layout_changes_no_number(row: str, layout: str, matrix: Matrix) -> None:
    deviation = matrix.deviation(row, layout)
    print(row, "|", layout, "|", deviation)
    assert not deviation.exceeded(ROWS[row].tolerance)


@pytest.fixture(scope="module")
def slow_matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    yield Matrix(SLOW_ROWS, tmp_path_factory.mktemp("mtp"))


@pytest.mark.slow
@pytest.mark.parametrize(("row", "layout"), [(row, each) for row in SLOW_ROWS for each in SLOW_ROWS[row].layouts])
def test_a_layout_changes_no_number_of_any_row(row: str, layout: str, slow_matrix: Matrix) -> None:
    deviation = slow_matrix.deviation(row, layout)
    print(row, "|", layout, "|", deviation)
    assert not deviation.exceeded(SLOW_ROWS[row].tolerance)
