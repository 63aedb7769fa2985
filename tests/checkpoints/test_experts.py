"""Checkpoints of experts: what learned with them spread one way goes on bit for bit with them spread another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.models.plain_megatron import run_ranks
from tests.tiny import make_model

RANK = "from tests.checkpoints.learner import continue_on_this_layout; continue_on_this_layout()"


@pytest.mark.parametrize(
    ("family", "flags", "saved", "loaded"),
    [
        ("glm4_moe", "--fp32 --use-distributed-optimizer", 2, [1, 4]),
        ("glm4_moe", "--fp32", 2, [1, 2]),
        ("qwen3_moe", "--fp32 --use-distributed-optimizer", 1, [2]),
        ("qwen3_moe", "--bf16", 1, [2]),
    ],
    ids=str,
)
def test_experts_may_be_spread_over_other_ranks(
    tmp_path: Path, family: str, flags: str, saved: int, loaded: list[int]
) -> None:
    """``saved`` and ``loaded`` are expert-parallel sizes, each on as many ranks."""
    hf_dir = make_model(tmp_path / "hf", family)
    (tmp_path / "checkpoint").mkdir()

    def run(do: str, ranks: int) -> dict[str, torch.Tensor]:
        places = {"HF": hf_dir, "OUT": tmp_path / "out", "CHECKPOINT": tmp_path / "checkpoint"}
        variables = {key: str(value) for key, value in places.items()}
        run_ranks(RANK, ranks, DO=do, FLAGS=flags, TP="1", PP="1", EP=str(ranks), **variables)
        return load_file(tmp_path / "out")

    expected = run("save", saved)
    for ranks in loaded:
        weights = run("load", ranks)
        assert weights.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []
