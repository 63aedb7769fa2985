"""The two conversion tools, as the guide calls them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints.learner import Learner
from tests.models.plain_megatron import free_port, parallel_layout
from tests.tiny import make_model
from vime.checkpoints import TRACKER, CheckpointStore
from vime.errors import UserError
from vime.models import load_shape

ROOT = Path(__file__).parents[2]
MODEL_ARGS = [
    *("--swiglu", "--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "128", "--disable-bias-linear"),
    *("--num-attention-heads", "4", "--group-query-attention", "--num-query-groups", "2", "--kv-channels", "32"),
    *("--qk-layernorm", "--normalization", "RMSNorm", "--norm-epsilon", "1e-6", "--use-rotary-position-embeddings"),
    *("--rotary-base", "10000", "--vocab-size", "512"),
]


def run(*command: object) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240)


def to_hf(input_dir: Path, output_dir: Path, origin: Path, **options: object) -> None:
    from vime.training.convert import torch_dist_to_hf

    torch_dist_to_hf(input_dir, output_dir, origin, **options)  # type: ignore[arg-type]


def to_torch_dist(*argv: object) -> Path:
    from vime.training.convert import hf_to_torch_dist

    return hf_to_torch_dist([str(word) for word in argv])


def assert_same_weights(a: Path, b: Path) -> None:
    left, right = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert left.keys() == right.keys()
    assert all(left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left)


def test_there_and_back_by_the_command_lines_of_the_guide(tmp_path: Path) -> None:
    """Two processes there, one back: the same bits, config and tokenizer."""
    hf_dir = make_model(tmp_path / "hf", "qwen3", dtype="bfloat16")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port()]
    there = run(
        *torchrun,
        "tools/convert_hf_to_torch_dist.py",
        *MODEL_ARGS,
        "--hf-checkpoint",
        hf_dir,
        "--save",
        tmp_path / "td",
    )
    assert there.returncode == 0, there.stderr
    assert (tmp_path / "td" / TRACKER).read_text().strip() == "0"
    folder = tmp_path / "td" / "iter_0000000"
    assert {path.name for path in folder.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    back = run(
        sys.executable, "tools/convert_torch_dist_to_hf.py", "--input-dir", f"{folder}/",
        "--output-dir", tmp_path / "back", "--origin-hf-dir", hf_dir,
    )  # fmt: skip
    assert back.returncode == 0, back.stderr
    assert back.stdout == f"wrote {tmp_path / 'back'}\n"
    assert_same_weights(tmp_path / "back", hf_dir)
    assert sorted(p.name for p in (tmp_path / "back").iterdir()) == sorted(p.name for p in hf_dir.iterdir())
    assert (tmp_path / "back" / "config.json").read_text().strip() == (hf_dir / "config.json").read_text().strip()


def test_a_wrong_flag_ends_with_one_line_and_status_1(tmp_path: Path) -> None:
    hf_dir = make_model(tmp_path / "hf")
    result = run(
        sys.executable, "tools/convert_hf_to_torch_dist.py", "--hidden-size", 65, "--hf-checkpoint", hf_dir,
        "--save", tmp_path / "td",
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr == f"error: --hidden-size 65 differs from {hf_dir}/config.json, which says 64\n"


def test_float32_stays_float32_and_the_checkpoint_is_for_weights_only(tmp_path: Path) -> None:
    hf_dir = make_model(tmp_path / "hf", "qwen2", tied=True)
    folder = to_torch_dist("--hf-checkpoint", hf_dir, "--save", tmp_path / "td")
    point = CheckpointStore(tmp_path / "td").resolve()
    assert point is not None and point.directory == folder and point.weights_only
    to_hf(folder, tmp_path / "back", hf_dir)
    assert_same_weights(tmp_path / "back", hf_dir)


def test_a_checkpoint_of_training_converts_too(tmp_path: Path) -> None:
    from vime.training.weights_io import hf_weights

    hf_dir = make_model(tmp_path / "hf", dtype="bfloat16", vocab_size=515)
    store = CheckpointStore(tmp_path / "run")
    with parallel_layout():
        from vime.training.checkpoint import save_megatron

        learner = Learner(hf_dir, "--bf16", "--use-distributed-optimizer", "--make-vocab-size-divisible-by", "128")
        learner.learn(2)
        save_megatron(store.begin(20), learner.chunks, learner.optimizer, learner.scheduler)
        folder = store.commit(20, {"cursor": 7})
        expected = {name: tensor.clone() for name, tensor in hf_weights(learner.chunks, learner.shape)}
    to_hf(folder, tmp_path / "back", hf_dir)
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert written["lm_head.weight"].shape == (515, 64)
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    with pytest.raises(UserError, match=r"has checkpoints of a run \(20\)"):
        to_torch_dist("--hf-checkpoint", hf_dir, "--save", tmp_path / "run")
    to_hf(folder, tmp_path / "padded", hf_dir, vocab_size=640)  # with Megatron's padding
    assert load_shape(tmp_path / "padded").vocab_size == 640
    assert load_file(tmp_path / "padded" / "model.safetensors")["lm_head.weight"].shape == (640, 64)
    with pytest.raises(UserError, match=r"--vocab-size 641 is more than the 640 embedding rows"):
        to_hf(folder, tmp_path / "more", hf_dir, vocab_size=641)


def test_a_root_instead_of_a_checkpoint_is_told_with_what_is_in_it(tmp_path: Path) -> None:
    hf_dir = make_model(tmp_path / "hf")
    for name in ("iter_0000003", "iter_0000006"):
        (tmp_path / "run" / name).mkdir(parents=True)
    with pytest.raises(UserError, match="is a root; name one of its checkpoints: iter_0000003, iter_0000006"):
        to_hf(tmp_path / "run", tmp_path / "out", hf_dir)
    with pytest.raises(UserError, match="no such folder"):
        to_hf(tmp_path / "absent", tmp_path / "out", hf_dir)


def test_what_is_required_is_said(tmp_path: Path) -> None:
    hf_dir = make_model(tmp_path / "hf")
    with pytest.raises(UserError, match="--save is required"):
        to_torch_dist("--hf-checkpoint", hf_dir)
    with pytest.raises(UserError, match="--hf-checkpoint is required"):
        to_torch_dist("--save", tmp_path / "td")
    with pytest.raises(UserError, match="num-layer"):
        to_torch_dist("--num-layer", 2, "--hf-checkpoint", hf_dir, "--save", tmp_path / "td")


def test_layers_that_processes_cannot_share_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="3 processes cannot share 2 layers evenly"):
        to_torch_dist("--hf-checkpoint", make_model(tmp_path / "hf"), "--save", tmp_path / "td")
