"""The format "torch", ours and Megatron-LM's, and torch_dist checkpoints that Megatron-LM wrote."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.learner import Learner
from tests.models.plain_megatron import build, parallel_layout
from tests.tiny import make_model
from vime.checkpoints import CheckpointStore
from vime.errors import DamagedFile, UserError
from vime.models import load_shape

FILE = "mp_rank_00/model_optim_rng.pt"


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    with parallel_layout():
        yield


def saved(folder: Path, learner: Learner, ckpt_format: str = "torch") -> Path:
    from vime.training.checkpoint import save_megatron

    folder.mkdir(parents=True)
    save_megatron(folder, learner.chunks, learner.optimizer, learner.scheduler, ckpt_format=ckpt_format)  # type: ignore[arg-type]
    return folder


def load_weights(folder: Path, learner: Learner) -> dict[str, torch.Tensor]:
    from vime.training import checkpoint

    checkpoint.load_weights(folder, learner.chunks)
    return learner.weights()


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("flags", [["--fp32"], ["--bf16"], ["--bf16", "--use-distributed-optimizer"]], ids=" ".join)
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, flags: list[str]) -> None:
    from vime.training.checkpoint import load_megatron

    hf_dir = make_model(tmp_path / "hf", dtype="bfloat16")
    learner = Learner(hf_dir, *flags)
    learner.learn(3)
    folder = saved(tmp_path / "checkpoint", learner)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*.pt")}
    assert files == {FILE} | ({"mp_rank_00/distrib_optim.pt"} if len(flags) > 1 else set())
    expected = torch.rand(1)
    learner.learn(2)
    resumed = Learner(hf_dir, *flags)
    loaded = load_megatron(folder, resumed.chunks, resumed.optimizer, resumed.scheduler)
    assert loaded.optimizer and loaded.random_states
    assert torch.equal(torch.rand(1), expected)
    resumed.learn(2)
    assert all(torch.equal(a, b) for a, b in zip(resumed.everything(), learner.everything(), strict=True))


def megatron_lms(folder: Path, tensor_parallel: int, extra: Any = None) -> Path:
    """Changes a checkpoint of ours into what Megatron-LM would have written, with norms fused into linear layers."""
    from vime.models.torch_dist import fused_norm_name

    state = torch.load(folder / FILE, weights_only=True)
    sizes = {"tensor_model_parallel_size": tensor_parallel, "pipeline_model_parallel_size": 1, "world_size": 8}
    model = {fused_norm_name(name): value for name, value in state["model"].items()}
    theirs = {"args": argparse.Namespace(**sizes), "iteration": 100, "model": model, "extra": extra}
    torch.save(theirs, folder / FILE)
    return folder


def test_megatron_lms_own_is_found_and_gives_its_weights(tmp_path: Path) -> None:
    hf_dir = make_model(tmp_path / "hf")
    learner = Learner(hf_dir, "--fp32")
    learner.learn(1)
    megatron_lms(saved(tmp_path / "root" / "iter_0000100", learner), 1)
    (tmp_path / "root" / "latest_checkpointed_iteration.txt").write_text("100")
    point = CheckpointStore(tmp_path / "root").resolve()
    assert point is not None and point.weights_only
    assert_same(load_weights(point.directory, Learner(hf_dir, "--fp32")), learner.weights())


def test_another_layout_is_refused_naming_both(tmp_path: Path) -> None:
    learner = Learner(make_model(tmp_path / "hf"), "--fp32")
    folder = megatron_lms(saved(tmp_path / "checkpoint", learner), 2)
    said = r"was saved with --tensor-model-parallel-size 2, .* and this run has --tensor-model-parallel-size 1, "
    with pytest.raises(UserError, match=said + r".*needs the same layout"):
        load_weights(folder, learner)


def test_a_file_that_would_run_code_is_not_loaded(tmp_path: Path) -> None:
    learner = Learner(make_model(tmp_path / "hf"), "--fp32")
    folder = megatron_lms(saved(tmp_path / "checkpoint", learner), 1, extra=Evil(f"touch {tmp_path}/ran"))
    with pytest.raises(UserError, match=r"model_optim_rng\.pt: has more than tensors and plain values"):
        load_weights(folder, learner)
    assert not (tmp_path / "ran").exists()


class Evil:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_a_file_that_is_cut_off_is_one_line(tmp_path: Path) -> None:
    from vime.training.checkpoint import load_megatron

    learner = Learner(make_model(tmp_path / "hf"), "--bf16", "--use-distributed-optimizer")
    folder = saved(tmp_path / "checkpoint", learner)
    for name in ("mp_rank_00/distrib_optim.pt", FILE):
        whole = (folder / name).read_bytes()
        for wrong in (b"", whole[:1000]):
            (folder / name).write_bytes(wrong)
            with pytest.raises(DamagedFile, match=rf"^{folder / name}: cannot be read: ") as raised:
                load_megatron(folder, learner.chunks, learner.optimizer, learner.scheduler)
            assert "\n" not in str(raised.value)
        (folder / name).write_bytes(whole)


def test_a_checkpoint_of_another_model_is_told(tmp_path: Path) -> None:
    folder = saved(tmp_path / "checkpoint", Learner(make_model(tmp_path / "hf"), "--fp32"))
    wider = Learner(make_model(tmp_path / "wide", intermediate_size=256), "--fp32")
    with pytest.raises(UserError, match=r"of another model: its .*fc1.weight is \[256, 64\] instead of \[512, 64\]"):
        load_weights(folder, wider)


def test_torch_dist_of_megatrons_own_layers_gives_its_weights(tmp_path: Path) -> None:
    """Megatron's layer specification calls the norms as if they were fused; Megatron-LM adds ``args``."""
    from megatron.core import dist_checkpointing

    from vime.training.checkpoint import _PlainSave
    from vime.training.weights_io import hf_weights, load_hf_weights

    hf_dir = make_model(tmp_path / "hf", seed=1)
    shape = load_shape(hf_dir)
    model = build(shape)
    load_hf_weights([model], shape, hf_dir)
    state = {"model": model.sharded_state_dict(), "args": argparse.Namespace(num_layers=2), "iteration": 100}
    (tmp_path / "checkpoint").mkdir()
    dist_checkpointing.save(state, str(tmp_path / "checkpoint"), _PlainSave())
    other = Learner(make_model(tmp_path / "other"), "--fp32")
    assert_same(load_weights(tmp_path / "checkpoint", other), dict(hf_weights([model], shape)))


def test_saving_starts_no_process_and_needs_no_psutil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's own writer waits for ever where psutil is missing."""
    learner = Learner(make_model(tmp_path / "hf"), "--fp32")
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a process was started"))
    folder = saved(tmp_path / "checkpoint", learner, "torch_dist")
    assert_same(load_weights(folder, learner), learner.weights())
