"""Experts, in every layout, compute what one process does, when all follow the same routes.

Free routers would do nearly so: where two scores tie but for rounding, a layout may choose otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state

from tests.training.layouts import LAYOUTS, Row, _of, recompute
from tests.training.test_layouts import PER_SAMPLE, PER_TOKEN, Matrix
from vime.training.layers.moe import Router
from vime.training.packing import MicroBatch, Packer
from vime.training.replay import Routes
from vime.training.worker import TrainWorker


@contextmanager
def routes_by_token(worker: TrainWorker, left: Any) -> Iterator[None]:
    """Which experts a token goes to depends on the token, its position and the layer alone."""
    pack = Packer.pack

    def with_routes(self: Packer, *args: Any) -> MicroBatch:
        batch = pack(self, *args)
        batch.segments.routes = Routes({each: experts_of(batch, each, worker) for each in layers_of(worker)})
        return batch

    with mock.patch.object(Packer, "pack", with_routes):
        yield


def layers_of(worker: TrainWorker) -> list[int]:
    routers = [module for chunk in worker.chunks for module in chunk.modules() if isinstance(module, Router)]
    return [router.layer_number for router in routers]


def experts_of(batch: MicroBatch, layer: int, worker: TrainWorker) -> torch.Tensor:
    assert worker.shape.moe is not None
    experts, chosen = worker.shape.moe.num_experts, worker.shape.moe.top_k
    first = batch.tokens_l * 31 + batch.positions_l * 17 + layer * 7
    if worker.config.parallel.sequence_parallel:
        first = first.chunk(parallel_state.get_tensor_model_parallel_world_size())[
            parallel_state.get_tensor_model_parallel_rank()
        ]
    step = 1 + first % (experts - 1)
    return ((first[:, None] + step[:, None] * torch.arange(chosen, device=first.device)) % experts).short()


SELECTIVE = recompute("selective") | {"megatron": {"recompute_modules": ["moe"]}}
LAYOUTS.update(
    {
        "ep2": _of(2, ep=2),
        "ep2 do": _of(2, ep=2, do=True),
        "ep2 moe": _of(2, ep=2, **SELECTIVE),
        "cp2 ep2": _of(2, cp=2, ep=2),
        "tp2 sp etp2": _of(2, tp=2, sp=True, etp=2),
        "tp2 sp etp1": _of(2, tp=2, sp=True, etp=1),
        "tp2 sp etp1 do": _of(2, tp=2, sp=True, etp=1, do=True),
        "tp2 sp ep2": _of(2, tp=2, sp=True, ep=2),
        "ep4 do": _of(4, ep=4, do=True),
        "tp2 sp ep2 etp2 do": _of(4, tp=2, sp=True, ep=2, etp=2, do=True),
        "pp2 ep2 full": _of(4, pp=2, ep=2, **recompute("full", "uniform", 1)),
    }
)
TWO = (
    "dp2",
    "ep2",
    "ep2 do",
    "ep2 moe",
    "cp2 ep2",
    "tp2 sp etp2",
    "tp2 sp etp1",
    "tp2 sp etp1 do",
    "tp2 sp ep2",
    "pp2 full",
)
FOUR = ("ep4 do", "tp2 sp ep2 etp2 do", "pp2 ep2 full")
BALANCED = ["--fp32", "--lr", "1e-3", "--clip-grad", "0.1", "--num-steps-per-rollout", "2", "--rollout-batch-size", "8"]
BALANCED += ["--micro-batch-size", "2", "--moe-aux-loss-coeff", "0.1"]
"""Micro-batches are the same in every layout; the packs of those with several chunks are filled up."""
ROWS = {
    "glm4_moe, per sample": Row(family="glm4_moe", flags=["--fp32", *PER_SAMPLE], layouts=TWO, around=routes_by_token),
    "balanced": Row(
        family="glm4_moe",
        flags=BALANCED,
        layouts=("dp2", "ep2 moe", "cp2 ep2", "tp2 sp etp2", "pp2 full"),
        around=routes_by_token,
    ),
}
SLOW_ROWS = {
    "qwen3_moe, per token": Row(
        family="qwen3_moe", flags=["--fp32", *PER_TOKEN], layouts=TWO + FOUR, around=routes_by_token
    )
}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(ROWS, tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def slow_matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(SLOW_ROWS, tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize(("row", "layout"), [(row, each) for row in ROWS for each in ROWS[row].layouts])
def test_a_layout_changes_no_number(row: str, layout: str, matrix: Matrix) -> None:
    deviation = matrix.deviation(row, layout)
    print(row, "|", layout, "|", deviation)
    assert not deviation.exceeded(ROWS[row].tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "layout"), [(row, each) for row in SLOW_ROWS for each in SLOW_ROWS[row].layouts])
def test_a_layout_changes_no_number_of_any_row(row: str, layout: str, slow_matrix: Matrix) -> None:
    deviation = slow_matrix.deviation(row, layout)
    print(row, "|", layout, "|", deviation)
    assert not deviation.exceeded(SLOW_ROWS[row].tolerance)


def test_the_balanced_row_has_the_loss_of_routers_in_it(matrix: Matrix, tmp_path: Path) -> None:
    """Without it the router learns something else, by far more than layouts may differ."""
    alone = matrix.alone("balanced").gradients
    unbalanced = Matrix({"free": dataclasses.replace(ROWS["balanced"], flags=BALANCED[:-2])}, tmp_path)
    name = "model.layers.1.mlp.gate.weight"
    other = unbalanced.alone("free").gradients[name]
    assert float((alone[name] - other).norm()) > 0.01 * float(other.norm())
