"""Training a part of the parameters: what learns, what stays, and that the layout does not matter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import add_mtp_layer, make_model
from tests.training.harness import batch_of, config_of, free_port, make_samples, on_ranks, started
from vime.checkpoints import CheckpointStore
from vime.errors import UserError
from vime.training.weights_io import global_parameters

LEARNS = ["--lr", "1e-2", "--fp32"]


def moved(worker: Any) -> set[str]:
    """The parameters that a training step changed."""
    before = {name: value.detach().clone() for name, value in global_parameters(worker.chunks).items()}
    worker.train(batch_of(make_samples()))
    return {name for name, value in global_parameters(worker.chunks).items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize(
    "recompute",
    [(), ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")],
    ids=["kept", "recomputed"],
)
def test_frozen_parameters_stay_and_the_others_learn(model_of: Callable[..., Path], recompute: tuple[str, ...]) -> None:
    flags = [*LEARNS, *recompute, "--freeze-params-name-list", "embedding", r"mlp\.linear_fc1"]
    with started(config_of(model_of(), *flags)) as worker:
        names, found = set(global_parameters(worker.chunks)), moved(worker)
    frozen = {name for name in names if "embedding" in name or "linear_fc1.weight" in name}
    assert len(frozen) == 3 and found == names - frozen


def test_only_what_was_asked_for_learns(model_of: Callable[..., Path]) -> None:
    with started(config_of(model_of(), *LEARNS, "--only-train-params-name-list", r"layers\.1\..*proj")) as worker:
        found = moved(worker)
    assert found == {"decoder.layers.1.self_attention.linear_proj.weight"}


@pytest.mark.parametrize(
    ("patterns", "ckpt_format"),
    [(("embedding", "layers.0"), "torch"), (("embedding", "linear_fc1"), "torch_dist")],
    ids=["a layer", "a kind in all layers"],
)
def test_a_run_that_trains_a_part_resumes(
    model_of: Callable[..., Path], tmp_path: Path, patterns: tuple[str, ...], ckpt_format: str
) -> None:
    flags = [*LEARNS, "--ckpt-format", ckpt_format, "--freeze-params-name-list", *patterns]
    store = CheckpointStore(tmp_path)
    with started(config_of(model_of(), *flags)) as worker:
        worker.train(batch_of(make_samples()))
        worker.save(store.begin(0))
        store.commit(0, {})
        expected = worker.train(batch_of(make_samples(seed=1))).steps[0]
    with started(config_of(model_of(), *flags, "--load", str(tmp_path))) as worker:
        found = worker.train(batch_of(make_samples(seed=1))).steps[0]
    for name in ("train/loss", "train/grad_norm"):
        assert found[name] == expected[name]


def test_what_no_checkpoint_could_hold_is_refused_at_the_start(model_of: Callable[..., Path], tmp_path: Path) -> None:
    config = config_of(model_of(), "--freeze-params-name-list", "layers.0", "--save", str(tmp_path))
    message = r"decoder.layers.\*.* is trained in some layers and frozen in others, .* give --ckpt-format torch"
    with pytest.raises(UserError, match=message), started(config):
        pass


def test_a_pattern_that_matches_nothing_is_an_error(model_of: Callable[..., Path]) -> None:
    flags = ["--freeze-params-name-list", "embedding", "q_proj"]
    message = "--freeze-params-name-list: no parameter's name contains q_proj; names are"
    with pytest.raises(UserError, match=message), started(config_of(model_of(), *flags)):
        pass


def test_nothing_left_to_train_is_an_error(model_of: Callable[..., Path]) -> None:
    config = config_of(model_of(), "--freeze-params-name-list", ".")
    with pytest.raises(UserError, match="rank 0 of 1 would have no parameter to train"), started(config):
        pass


def test_a_tied_embedding_is_frozen_on_both_ends_of_a_pipeline(model_of: Callable[..., Path]) -> None:
    flags = [*LEARNS, "--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2"]
    flags += ["--freeze-params-name-list", "embedding", r"layers\.0\.mlp"]
    config, port = config_of(model_of(tied=True), *flags), free_port()
    first, last = on_ranks(2, moved_on_rank, config, port)
    assert {name for name in first if "layers.0" in name} == first and not any(".mlp." in name for name in first)
    assert "output_layer.weight" not in last and any("layers.1.mlp." in name for name in last)


def moved_on_rank(rank: int, world_size: int, config: Any, port: int) -> set[str]:
    with started(config, rank=rank, world_size=world_size, port=port) as worker:
        return moved(worker)


def test_a_checkpoint_with_other_parameters_frozen_is_refused(model_of: Callable[..., Path], tmp_path: Path) -> None:
    flags = [*LEARNS, "--ckpt-format", "torch"]
    with started(config_of(model_of(), *flags, "--freeze-params-name-list", "embedding")) as worker:
        worker.save(CheckpointStore(tmp_path).begin(0))
        CheckpointStore(tmp_path).commit(0, {})
    config = config_of(model_of(), *LEARNS, "--load", str(tmp_path))
    message = "iter_0000000 was saved with other parameters frozen: resume with the same --freeze-params-name-list"
    with pytest.raises(UserError, match=message), started(config):
        pass


def test_a_draft_layer_that_is_to_learn_must_not_be_frozen(tmp_path: Path) -> None:
    folder = add_mtp_layer(make_model(tmp_path / "model", "glm4_moe"))
    flags = [*LEARNS, "--mtp-num-layers", "1", "--enable-mtp-training", "--only-train-params-name-list", "decoder"]
    refused = pytest.raises(UserError, match="freezes the layer that --enable-mtp-training is to train")
    with refused, started(config_of(folder, *flags)):
        pass
