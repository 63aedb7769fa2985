"""The critic in every layout: values, value loss, gradients and weights are those of one process."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.training.harness import make_children, started_critic
from tests.training.layouts import FP32, LAYOUTS, Matrix, Row, Subject
from tests.training.test_critic import set_head
from vime.models import HfTensor, WeightRule, weight_map
from vime.training.critic import CriticWorker
from vime.training.value_model import HEAD
from vime.training.weights_io import global_parameters
from vime.types import TokenScores, TrainBatch, TrainSample

FLAGS = ["--advantage-estimator", "ppo", "--gamma", "0.95", "--lambd", "0.9", "--value-clip", "0.02"]
FLAGS += ["--kl-coef", "0.1", "--kl-loss-type", "k3", "--critic-lr", "1e-3", "--clip-grad", "0.1"]
FLAGS += ["--num-steps-per-rollout", "2", "--rollout-batch-size", "8"]
FLAGS += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "24"]
OFTEN = ("dp2 do overlap", "tp2", "tp2 sp", "pp2 full", "pp2 vpp2", "cp2 do")


def rules(worker: CriticWorker) -> Sequence[WeightRule]:
    """Those of the policy but its output layer, and the head, of which each tensor-parallel rank has all."""
    policy = [rule for rule in weight_map(worker.shape) if rule.megatron != "output_layer.weight"]
    return [*policy, WeightRule(megatron=HEAD, hf=(HfTensor(HEAD, (1, worker.shape.hidden_size)),))]


def prepared(worker: CriticWorker, share: TrainBatch) -> TrainBatch:
    """A head that is not 0, and samples with what actor, reference and critic say of them."""
    if HEAD in global_parameters(worker.chunks):
        set_head(worker, 0.05)  # values of the size of rewards
    else:
        worker.optimizer.reload_model_params()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, worker.score(share))
    values = {index: scores for of_rank in found for index, scores in of_rank.items()}
    return dataclasses.replace(share, samples=tuple(_scored(each, values[each.index]) for each in share.samples))


def _scored(sample: TrainSample, values: TokenScores) -> TrainSample:
    """With log-probs that depend on nothing but the sample."""
    rng = random.Random(sample.index)
    log_probs, ref_log_probs = (tuple(rng.uniform(-6, -5) for _ in sample.loss_mask) for _ in range(2))
    scores = TokenScores(log_probs=log_probs, ref_log_probs=ref_log_probs).merged(values)
    return dataclasses.replace(sample, scores=scores)


def says(worker: CriticWorker, share: TrainBatch) -> dict[int, Tensor]:
    return {index: torch.tensor(scores.values) for index, scores in worker.score(share).items()}


CRITIC = Subject(
    started=started_critic,
    rules=rules,
    prepared=prepared,
    says=says,
    gradient_norm="train/critic_grad_norm",
)
UNTIED = Row(
    family="qwen3", overrides={"num_hidden_layers": 4}, flags=["--fp32", *FLAGS], layouts=OFTEN, subject=CRITIC
)
TIED = dataclasses.replace(
    UNTIED,
    overrides={"num_hidden_layers": 4, "tied": True},
    flags=["--fp32", *FLAGS, "--calculate-per-token-loss", "--balance-data"],
    layouts=("pp2", "cp2 full"),
)
CHILDREN = dataclasses.replace(UNTIED, samples=lambda: make_children(16), layouts=("dp2", "pp2 vpp2", "cp2 do"))
ROWS = {"untied, per sample": UNTIED, "tied, per token": TIED, "children": CHILDREN}
SLOW_ROWS = {name: dataclasses.replace(row, layouts=tuple(LAYOUTS)) for name, row in ROWS.items()}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(ROWS, tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="module")
def full_matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(SLOW_ROWS, tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize(("row", "layout"), [(row, each) for row in ROWS for each in ROWS[row].layouts])
def test_a_layout_changes_no_number(row: str, layout: str, matrix: Matrix) -> None:
    assert not matrix.deviation(row, layout).exceeded(FP32)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("row", "layout"), [(row, each) for row in SLOW_ROWS for each in SLOW_ROWS[row].layouts])
def test_no_layout_changes_a_number(row: str, layout: str, full_matrix: Matrix) -> None:
    assert not full_matrix.deviation(row, layout).exceeded(FP32)


def test_the_critic_of_the_matrix_has_work_to_do(matrix: Matrix, tmp_path: Path) -> None:
    """Every term that could differ is there: values and clips, and gradients of the head and of the whole model."""
    alone = matrix.alone("untied, per sample")
    first, second = alone.metrics
    assert first["rollout/values"] != 0
    assert 0 < second["train/critic_clipfrac"] < 1
    assert all(float(gradient.norm()) > 0 for gradient in alone.gradients.values())
    assert HEAD in alone.gradients
