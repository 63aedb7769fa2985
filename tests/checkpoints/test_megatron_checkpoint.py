"""Megatron's part of a checkpoint: exact on the same layout, loadable on every other."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints.learner import Learner
from tests.disk import files_end_at
from tests.models.plain_megatron import parallel_layout, run_ranks
from tests.tiny import make_model
from vime.errors import DamagedFile, UserError

OPTIMIZERS = {
    "fp32": ["--fp32"],
    "fp32, distributed optimizer": ["--fp32", "--use-distributed-optimizer"],
    "bf16": ["--bf16"],
    "bf16, distributed optimizer": ["--bf16", "--use-distributed-optimizer"],
}


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    with parallel_layout():
        yield


def save(folder: Path, learner: Learner, *, optimizer: bool = True) -> Path:
    from vime.training.checkpoint import save_megatron

    folder.mkdir(parents=True)
    save_megatron(folder, learner.chunks, learner.optimizer if optimizer else None, learner.scheduler)
    return folder


def resume(folder: Path, learner: Learner) -> Any:
    from vime.training.checkpoint import load_megatron

    return load_megatron(folder, learner.chunks, learner.optimizer, learner.scheduler)


def assert_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("flags", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, flags: list[str]) -> None:
    hf_dir = make_model(tmp_path / "hf", dtype="bfloat16")
    learner = Learner(hf_dir, *flags)
    learner.learn(5)
    folder = save(tmp_path / "checkpoint", learner)
    at_save = learner.everything()
    learner.learn(3)

    resumed = Learner(hf_dir, *flags)
    loaded = resume(folder, resumed)
    assert loaded.optimizer and loaded.random_states
    assert_equal(resumed.everything(), at_save)
    resumed.learn(3)
    assert_equal(resumed.everything(), learner.everything())
    assert not torch.equal(resumed.everything()[0], at_save[0])


def test_a_checkpoint_saved_before_the_first_step_can_be_resumed(tmp_path: Path) -> None:
    hf_dir = make_model(tmp_path / "hf")
    learner = Learner(hf_dir, "--fp32", "--use-distributed-optimizer")
    folder = save(tmp_path / "checkpoint", learner)
    learner.learn(2)
    resumed = Learner(hf_dir, "--fp32", "--use-distributed-optimizer")
    resume(folder, resumed)
    resumed.learn(2)
    assert_equal(resumed.everything(), learner.everything())


def test_it_is_megatrons_torch_dist_format_written_by_this_process(tmp_path: Path) -> None:
    learner = Learner(make_model(tmp_path / "hf"), "--fp32")
    learner.learn(1)
    folder = save(tmp_path / "checkpoint", learner)
    assert {path.name for path in folder.iterdir()} == {"__0_0.distcp", ".metadata", "common.pt", "metadata.json"}
    assert json.loads((folder / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    def draw() -> list[float]:
        with get_cuda_rng_tracker().fork():
            forked = torch.rand(1).item()
        return [random.random(), float(np.random.rand()), torch.rand(1).item(), forked]

    learner = Learner(make_model(tmp_path / "hf"), "--fp32")
    folder = save(tmp_path / "checkpoint", learner)
    expected = draw()
    assert draw() != expected
    resume(folder, learner)
    assert draw() == expected


def test_weights_alone_load_from_a_full_checkpoint_into_another_dtype(tmp_path: Path) -> None:
    from vime.training.checkpoint import load_weights

    hf_dir = make_model(tmp_path / "hf", dtype="bfloat16")
    learner = Learner(hf_dir, "--bf16", "--use-distributed-optimizer")
    learner.learn(3)
    folder = save(tmp_path / "checkpoint", learner)
    other = Learner(hf_dir, "--fp32")
    load_weights(folder, other.chunks)
    expected = {name: tensor.float() for name, tensor in learner.weights().items()}
    loaded = other.weights()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_without_saved_optimizer_state_it_starts_anew_from_the_loaded_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hf_dir = make_model(tmp_path / "hf", dtype="bfloat16")
    learner = Learner(hf_dir, "--bf16")
    learner.learn(5)
    folder = save(tmp_path / "checkpoint", learner, optimizer=False)
    resumed = Learner(hf_dir, "--bf16")
    with caplog.at_level(logging.WARNING):
        assert not resume(folder, resumed).optimizer
    assert "has no optimizer state: moments start at zero" in caplog.text
    saved = learner.weights()
    resumed.optimizer.chained_optimizers[
        0
    ]._copy_main_params_to_model_params()  # main weights must not bring the old ones back
    assert all(torch.equal(tensor, saved[name]) for name, tensor in resumed.weights().items())


def test_a_checkpoint_of_another_model_is_told_by_its_tensors(tmp_path: Path) -> None:
    learner = Learner(make_model(tmp_path / "hf"), "--fp32")
    folder = save(tmp_path / "checkpoint", learner)
    wider = Learner(make_model(tmp_path / "wide", intermediate_size=256), "--fp32")
    with pytest.raises(
        UserError, match=r"of another model: its .*fc1.weight is \[2, 256, 64\] instead of \[2, 512, 64\]"
    ):
        resume(folder, wider)
    other_family = Learner(make_model(tmp_path / "qwen3", "qwen3"), "--fp32")
    with pytest.raises(UserError, match=r"of another model: it has no .*q_layernorm.weight"):
        resume(folder, other_family)


def test_a_smaller_vocabulary_is_not_filled_with_zeros(tmp_path: Path) -> None:
    learner = Learner(make_model(tmp_path / "hf"), "--fp32")
    folder = save(tmp_path / "checkpoint", learner)
    larger = Learner(make_model(tmp_path / "larger", vocab_size=600), "--fp32")
    with pytest.raises(UserError, match=r"its embedding.word_embeddings.weight is \[512, 64\] instead of \[600, 64\]"):
        resume(folder, larger)


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    (tmp_path / "iter").mkdir()
    (tmp_path / "iter" / "anything").touch()
    learner = Learner(make_model(tmp_path / "hf"), "--fp32")
    with pytest.raises(UserError, match="is not a Megatron checkpoint, neither in torch_dist nor in torch format"):
        resume(tmp_path / "iter", learner)


@pytest.mark.parametrize("ckpt_format", ["torch_dist", "torch"])
@pytest.mark.parametrize("saved_with", [True, False], ids=["saved with", "saved without"])
def test_the_other_kind_of_optimizer_is_refused_by_its_flag(
    tmp_path: Path, ckpt_format: Literal["torch_dist", "torch"], saved_with: bool
) -> None:
    from vime.training.checkpoint import load_weights, save_megatron

    hf_dir = make_model(tmp_path / "hf")
    flags: list[list[str]] = [[], ["--use-distributed-optimizer"]]
    learner, other = Learner(hf_dir, "--fp32", *flags[saved_with]), Learner(hf_dir, "--fp32", *flags[not saved_with])
    (tmp_path / "checkpoint").mkdir()
    learner.learn(1)
    save_megatron(
        tmp_path / "checkpoint", learner.chunks, learner.optimizer, learner.scheduler, ckpt_format=ckpt_format
    )
    untouched = other.weights()
    was, now = ("with", "without") if saved_with else ("without", "with")
    said = f"was saved {was} --use-distributed-optimizer and this run is {now}: resume {was} the flag, or start anew"
    with pytest.raises(UserError, match=said):
        resume(tmp_path / "checkpoint", other)
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in other.weights().items())
    load_weights(tmp_path / "checkpoint", other.chunks)
    saved = learner.weights()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in other.weights().items())


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_a_damaged_checkpoint_is_one_line(tmp_path: Path) -> None:
    learner = Learner(make_model(tmp_path / "hf"), "--fp32")
    folder = save(tmp_path / "checkpoint", learner)
    tensors = (folder / "__0_0.distcp").read_bytes()
    damaged = {
        "__0_0.distcp": [
            (tensors[:1000], "__0_0.distcp: ends after 1000 bytes"),
            (b"\0" * len(tensors), "cannot be read: "),
        ],
        ".metadata": [(b"", ".metadata: cannot be read: "), (b"\x80\x05garbage", ".metadata: cannot be read: ")],
        "common.pt": [
            (b"", "common.pt: cannot be read: "),
            ((folder / "common.pt").read_bytes()[:300], "cannot be read: "),
        ],
        "metadata.json": [(b'{"sharded', "metadata.json: not valid JSON: ")],
    }
    for name, versions in damaged.items():
        whole = (folder / name).read_bytes()
        for wrong, said in versions:
            (folder / name).write_bytes(wrong)
            with pytest.raises(DamagedFile, match=rf"^{folder}.*{said}") as raised:
                resume(folder, learner)
            assert "\n" not in str(raised.value)
        (folder / name).write_bytes(whole)
    assert resume(folder, learner).optimizer


@pytest.mark.parametrize("ckpt_format", ["torch_dist", "torch"])
def test_a_full_disk_is_one_line(tmp_path: Path, ckpt_format: Literal["torch_dist", "torch"]) -> None:
    from vime.training.checkpoint import save_megatron
    from vime.training.saving import saving

    learner = Learner(make_model(tmp_path / "hf"), "--fp32")
    with (
        files_end_at(10_000),
        pytest.raises(UserError, match=rf"^{tmp_path}: cannot be written: File too large$"),
        saving(tmp_path),
    ):
        save_megatron(tmp_path, learner.chunks, learner.optimizer, learner.scheduler, ckpt_format=ckpt_format)


@pytest.mark.parametrize("load", ["load_megatron", "load_weights", "weights_of"])
def test_metadata_that_would_run_code_is_not_loaded(tmp_path: Path, load: str) -> None:
    from vime.training import checkpoint

    learner = Learner(make_model(tmp_path / "hf"), "--fp32")
    folder = save(tmp_path / "checkpoint", learner)
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(f"touch {tmp_path}/ran")))
    with pytest.raises(UserError, match=r"\.metadata names posix\.system, which describes no tensor; not loaded"):
        getattr(checkpoint, load)(folder, *([] if load == "weights_of" else [learner.chunks]))
    assert not (tmp_path / "ran").exists()


def test_an_object_that_would_run_code_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vime.training import checkpoint

    learner = Learner(make_model(tmp_path / "hf"), "--fp32")
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "random_states", lambda: {"python": Evil(f"touch {tmp_path}/ran")})
        folder = save(tmp_path / "checkpoint", learner)
    with pytest.raises(
        UserError, match=r"checkpoint: has more than tensors and plain values, and is not loaded: .*system"
    ):
        resume(folder, learner)
    assert not (tmp_path / "ran").exists()


RANK = "from tests.checkpoints.learner import continue_on_this_layout; continue_on_this_layout()"


@pytest.mark.parametrize(
    ("tied", "saved", "loaded"),
    [(False, {"tp": 2}, [{"pp": 2}, {"dp": 2}]), (True, {"tp": 1}, [{"pp": 2}])],
    ids=["tensor parallel to pipeline or data parallel", "one rank to pipeline parallel, tied"],
)
def test_another_layout_goes_on_bit_for_bit(
    tmp_path: Path, tied: bool, saved: dict[str, int], loaded: list[dict[str, int]]
) -> None:
    hf_dir = make_model(tmp_path / "hf", tied=tied, vocab_size=515)
    (tmp_path / "checkpoint").mkdir()

    def run(do: str, tp: int = 1, pp: int = 1, dp: int = 1) -> dict[str, torch.Tensor]:
        variables = {"HF": hf_dir, "OUT": tmp_path / "out", "CHECKPOINT": tmp_path / "checkpoint", "TP": tp, "PP": pp}
        flags = "--fp32 --use-distributed-optimizer"
        run_ranks(RANK, tp * pp * dp, DO=do, FLAGS=flags, **{key: str(value) for key, value in variables.items()})
        return load_file(tmp_path / "out")

    expected = run("save", **saved)
    for layout in loaded:
        weights = run("load", **layout)
        assert weights.keys() == expected.keys(), layout
        assert all(torch.equal(weights[key], expected[key]) for key in expected), layout
