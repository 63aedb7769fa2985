"""What the processes of trainers find in their environment."""

from __future__ import annotations

from pathlib import Path

from tests.tiny import make_model
from tests.training.harness import config_of
from vime.cluster.actors import trainer_environment


def test_ranks_that_share_matrices_keep_the_order_of_launches(tmp_path: Path) -> None:
    """Megatron relies on one queue there; elsewhere it would only hold up copies."""
    model = make_model(tmp_path / "model")
    alone = config_of(model)
    shared = ["--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"]
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in trainer_environment(alone, 1)
    assert trainer_environment(config_of(model, *shared), 1)["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_what_was_asked_for_wins(tmp_path: Path) -> None:
    flags = ["--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"]
    flags += ["--train-env-vars", '{"CUDA_DEVICE_MAX_CONNECTIONS": 32, "OMP_NUM_THREADS": 3}']
    found = trainer_environment(config_of(make_model(tmp_path / "model"), *flags), 1)
    assert (found["CUDA_DEVICE_MAX_CONNECTIONS"], found["OMP_NUM_THREADS"]) == ("32", "3")
