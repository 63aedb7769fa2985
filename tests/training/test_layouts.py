"""Every layout computes what one process does: losses, metrics, log-probs, gradients and weights.

``layouts.py`` tells how to add a row. What always runs covers each kind of parallelism once; the rest is marked slow.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from tests.training.harness import make_children
from tests.training.layouts import FP32, LAYOUTS, Matrix, Row, Tolerance
from vime.training import step
from vime.training.worker import TrainWorker

OBJECTIVE = ["--lr", "1e-3", "--clip-grad", "0.1", "--num-steps-per-rollout", "2", "--use-kl-loss"]
OBJECTIVE += ["--kl-loss-coef", "0.1", "--entropy-coef", "0.01", "--rollout-batch-size", "8"]
OBJECTIVE += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "24"]
PER_SAMPLE = [*OBJECTIVE, "--kl-loss-type", "k3", "--normalize-advantages"]
PER_TOKEN = [*OBJECTIVE, "--kl-loss-type", "k1", "--calculate-per-token-loss", "--balance-data"]

UNTIED = Row(family="qwen3", overrides={"num_hidden_layers": 4}, flags=["--fp32", *PER_SAMPLE], layouts=())
TIED = Row(family="qwen3", overrides={"num_hidden_layers": 4, "tied": True}, flags=["--fp32", *PER_TOKEN], layouts=())
BF16 = Row(
    family="qwen3",
    overrides={"num_hidden_layers": 4},
    flags=["--bf16", *PER_SAMPLE],
    layouts=(),
    # Sums in another order round otherwise, to 8 bits. Adam's first steps are all as long as the learning rate, and
    # shorter than the distance of neighbouring numbers near 1: whether a norm's weight moves at all is rounding.
    tolerance=Tolerance(loss=0.02, log_prob=0.1, gradient_norm=0.02, gradient=0.06, update=math.inf),
)

WHOLE = ["--advantage-estimator", "gspo", "--eps-clip", "0.01", "--use-tis", "--tis-level", "sequence", "--tis-veto"]
WHOLE += ["0.1", "--tis-batch-normalize", "--use-opsm", "--opsm-delta", "1e-3", "--calculate-per-token-loss"]
SEQUENCES = Row(
    family="qwen3",
    overrides={"num_hidden_layers": 4},
    flags=["--fp32", *PER_SAMPLE, *WHOLE],
    layouts=(),
    # A weight is the exponential of a sum over a sample: it multiplies what rounding has left of the first step.
    tolerance=Tolerance(loss=3e-5),
)
"""Ratios, weights and masks of whole samples, whose tokens context-parallel ranks share."""

REINFORCE = ["--loss-type", "custom_loss", "--custom-loss-function-path", "examples.plugins.losses:reinforce"]
CUSTOM_LOSS = Row(
    family="qwen3",
    flags=["--fp32", *OBJECTIVE, *REINFORCE],
    layouts=(),
)
"""A loss made from the logits of the whole vocabulary, which ranks share."""


CHILDREN = dataclasses.replace(UNTIED, samples=lambda: make_children(16))
"""Several samples of one: they share a denominator, wherever ranks and steps put them."""


@contextmanager
def blind_to_context_parallelism(worker: TrainWorker, left: Any) -> Iterator[None]:
    """The mistake of a loss that is scaled by the data-parallel ranks alone."""
    sizes = step.parallel_state.get_data_parallel_world_size
    with mock.patch.object(step.parallel_state, "get_data_parallel_world_size", lambda **_: sizes()):
        yield


def with_layouts(row: Row, *layouts: str) -> Row:
    return dataclasses.replace(row, layouts=layouts)


ROWS = {
    "untied, per sample": with_layouts(
        UNTIED, "dp2", "dp2 do overlap", "tp2 sp", "pp2 full", "pp2 vpp2", "cp2", "cp2 selective"
    ),
    "tied, per token": with_layouts(TIED, "dp2 do", "tp2", "pp2", "cp2 do"),
    "bf16": with_layouts(BF16, "dp2 do", "cp2 do"),
    "sequences": with_layouts(SEQUENCES, "dp2", "cp2"),
    "custom loss": with_layouts(CUSTOM_LOSS, "tp2 sp", "cp2"),
    "children": with_layouts(CHILDREN, "dp2 do", "tp2 sp", "pp2 vpp2", "cp2"),
    "blind to context parallelism": dataclasses.replace(UNTIED, layouts=("cp2",), around=blind_to_context_parallelism),
}
SLOW_ROWS = {
    "untied, per sample": with_layouts(UNTIED, *LAYOUTS),
    "tied, per token": with_layouts(TIED, *LAYOUTS),
    "sequences": with_layouts(SEQUENCES, "pp2 vpp2", "tp2 sp", "dp2 cp2 do", "tp2 sp cp2 do", "pp2 cp2", "cp4"),
    "custom loss": with_layouts(CUSTOM_LOSS, "dp2", "pp2", "tp2 cp2 full", "tp2 sp cp2 do"),
    "bf16": with_layouts(
        BF16, "dp2 do", "tp2 sp", "pp2", "pp2 vpp2", "cp2 do", "tp2 sp pp2 do", "dp2 pp2 vpp2 do overlap"
    ),
}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(ROWS, tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="module")
def full_matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(SLOW_ROWS, tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize(("row", "layout"), [(row, each) for row in list(ROWS)[:-1] for each in ROWS[row].layouts])
def test_a_layout_changes_no_number(row: str, layout: str, matrix: Matrix) -> None:
    assert not matrix.deviation(row, layout).exceeded(ROWS[row].tolerance)


def test_a_loss_that_forgets_context_parallelism_is_noticed(matrix: Matrix) -> None:
    """It is half as large as it should be for two ranks; the clipped gradient does not show it, its norm does."""
    deviation = matrix.deviation("blind to context parallelism", "cp2")
    assert deviation.exceeded(FP32).keys() >= {"gradient_norm"}
    assert deviation.gradient_norm == pytest.approx(0.5, abs=0.01)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("row", "layout"), [(row, each) for row in SLOW_ROWS for each in SLOW_ROWS[row].layouts])
def test_no_layout_changes_a_number(row: str, layout: str, full_matrix: Matrix) -> None:
    assert not full_matrix.deviation(row, layout).exceeded(SLOW_ROWS[row].tolerance)
