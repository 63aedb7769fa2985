"""A real engine loads weights from a Hugging Face folder, or says in one line what is wrong with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.serving.conftest import (
    Sender,
    Served,
    Weights,
    assert_serves,
    changed,
    plan_of,
)
from vime.weights.sync import SyncError, sync_engines
from vime.weights.transfers import Disk

NORM = "model.norm.weight"


def write_folder(folder: Path, model: Path, weights: Weights) -> Path:
    """In two files, in another order than the plan's, with a copy of the embedding that the plan does not have."""
    folder.mkdir()
    shutil.copyfile(model / "config.json", folder / "config.json")
    tensors = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    names = sorted(tensors, reverse=True)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, inside in files.items():
        save_file({name: tensors[name] for name in inside}, folder / file)
    index = {"weight_map": {name: file for file, inside in files.items() for name in inside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def proofs(served: Served) -> int:
    logs = (path.read_text(errors="replace") for path in served.folder.parent.glob("*.log"))
    return sum(log.count("the model computes with what was sent, 20 of 20") for log in logs)


async def test_what_a_folder_has_is_served_and_proven(tied: Sender, tied_engine: Served, tmp_path: Path) -> None:
    new, before = changed(tied_engine.weights, seed=11), proofs(tied_engine)
    folder = write_folder(tmp_path / "version", tied_engine.folder, new)
    version = next(Sender.versions)
    await sync_engines(Disk(plan_of(new), folder), [tied.control], version)
    await assert_serves(tied_engine, tied.control, new)
    assert await tied.control.weight_version() == version
    assert proofs(tied_engine) == before + 1


def without_a_tensor(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if name != NORM}


def with_a_wrong_shape(weights: Weights) -> Weights:
    return weights | {NORM: torch.ones(32)}


def with_a_wrong_dtype(weights: Weights) -> Weights:
    return weights | {NORM: weights[NORM].bfloat16()}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_a_tensor, r"version lacks the tensor model.norm.weight \(float32 \[64\]\)"),
        (with_a_wrong_shape, r"version has model.norm.weight as float32 \[32\], the plan says .*\(float32 \[64\]\)"),
        (with_a_wrong_dtype, r"version has model.norm.weight as bfloat16 \[64\], the plan says .*\(float32 \[64\]\)"),
        (None, r": neither model.safetensors nor model.safetensors.index.json is there"),
    ],
)
async def test_a_folder_without_the_plans_tensors_is_refused_and_the_old_weights_stay(
    tied: Sender,
    tied_engine: Served,
    tmp_path: Path,
    spoil: Callable[[Weights], Weights] | None,
    message: str,
) -> None:
    new, folder = changed(tied_engine.weights, seed=12), tmp_path / "version"
    if spoil is not None:
        write_folder(folder, tied_engine.folder, spoil(new))
    with pytest.raises(SyncError, match=rf"step 'load {folder}': engine 0 \(http://.*\).*{message}") as caught:
        await sync_engines(Disk(plan_of(new), folder), [tied.control], next(Sender.versions))
    assert "\n" not in str(caught.value)
    tied.control.dead = None  # for the run it is; it may have loaded something
    await tied.control.resume()
    await assert_serves(tied_engine, tied.control, tied_engine.weights)
