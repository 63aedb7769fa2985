"""The two conversion tools, as the guide calls them."""

from __future__ import annotations

import os
import signal
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


def test_any_number_of_processes_shares_the_parameters() -> None:
    from vime.training.convert import _share

    sizes = [100, 1, 1, 1, 97, 3, 3, 94, 100]
    parts = [_share(sizes, lambda size: size, rank, 4) for rank in range(4)]
    assert parts == [[100], [1, 1, 1, 97], [3, 3, 94], [100]]
    many = [_share(sizes, lambda size: size, rank, 20) for rank in range(20)]
    assert [size for part in many for size in part] == sizes


@pytest.mark.parametrize(
    ("family", "tied"), [("qwen2", False), ("llama", True), ("qwen3_moe", False), ("glm4_moe", False)]
)
def test_the_checkpoint_is_the_one_that_megatron_writes(tmp_path: Path, family: str, tied: bool) -> None:
    """The same tensors under the same names, with the same bits; Megatron loads them."""
    from vime.models.torch_dist import Place, TorchDistReader

    hf_dir = make_model(tmp_path / "hf", family, tied=tied, dtype="bfloat16", vocab_size=515)
    flags = ["--make-vocab-size-divisible-by", "128"]
    ours = TorchDistReader(to_torch_dist("--hf-checkpoint", hf_dir, "--save", tmp_path / "td", *flags))
    with parallel_layout():
        from megatron.core.dist_checkpointing import load_content_metadata

        from vime.training.checkpoint import load_weights, save_megatron, weights_of

        learner = Learner(hf_dir, "--bf16", *flags)
        (tmp_path / "megatrons").mkdir()
        save_megatron(tmp_path / "megatrons", learner.chunks)
        assert weights_of(ours.folder) == weights_of(tmp_path / "megatrons")
        assert load_content_metadata(str(ours.folder)) == {"optimizer": False, "scheduler": False}
        theirs = TorchDistReader(tmp_path / "megatrons")
        for key in weights_of(ours.folder):
            assert torch.equal(ours.read(Place(key)), theirs.read(Place(key))), key
        expected = learner.weights()
        for parameter in learner.chunks[0].parameters():
            parameter.data.zero_()
        load_weights(ours.folder, learner.chunks)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in learner.weights().items())


def test_memory_is_bounded_by_the_largest_parameter_and_not_by_the_model(tmp_path: Path) -> None:
    """Both directions in a process of its own, first with a small model, then with one of 24 times its layers."""
    small, large = (
        make_model(
            tmp_path / str(layers), hidden_size=512, intermediate_size=2048, num_hidden_layers=layers, head_dim=64
        )
        for layers in (1, 24)
    )
    model_bytes = (large / "model.safetensors").stat().st_size
    result = run(sys.executable, "-c", CONVERT_BOTH_WAYS, small, large)
    assert result.returncode == 0, result.stderr
    used, used_then = map(int, result.stdout.split())
    assert model_bytes > 300e6
    assert used_then - used < model_bytes / 6


CONVERT_BOTH_WAYS = """
import resource, sys
from pathlib import Path
from vime.training.convert import hf_to_torch_dist, torch_dist_to_hf

for folder in sys.argv[1:]:
    there = hf_to_torch_dist(["--hf-checkpoint", folder, "--save", folder + "-td"])
    torch_dist_to_hf(there, Path(folder + "-back"), Path(folder))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


KILL_AT_THE_NTH_TENSOR = """
import os, signal, sys
from pathlib import Path
from vime.observe.byte_progress import ByteProgress
from vime.training.convert import hf_to_torch_dist, torch_dist_to_hf

deadly, add = int(sys.argv[1]), ByteProgress.add

def add_and_die(self, nbytes):
    add(self, nbytes)
    if self._done == deadly:
        os.kill(os.getpid(), signal.SIGKILL)

ByteProgress.add = add_and_die
there = hf_to_torch_dist(["--hf-checkpoint", "hf", "--save", "td"]) if sys.argv[2] == "there" else None
torch_dist_to_hf(Path("td/iter_0000000"), Path("back"), Path("hf"))
"""


def test_a_killed_conversion_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    hf_dir = make_model(tmp_path / "hf")
    tensors = len(load_file(hf_dir / "model.safetensors"))

    def killed(deadly: int, direction: str) -> None:
        command = [sys.executable, "-c", KILL_AT_THE_NTH_TENSOR, str(deadly), direction]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        assert subprocess.run(command, cwd=tmp_path, env=environment, timeout=120).returncode == -signal.SIGKILL

    killed(5, "there")
    assert CheckpointStore(tmp_path / "td").resolve() is None
    assert all(path.name.startswith(".") for path in (tmp_path / "td").iterdir())
    folder = to_torch_dist("--hf-checkpoint", hf_dir, "--save", tmp_path / "td")
    killed(tensors, "back")
    assert not (tmp_path / "back").exists()
    to_hf(folder, tmp_path / "back", hf_dir)
    assert_same_weights(tmp_path / "back", hf_dir)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "td"]  # nothing is left over
    assert not [path for path in (tmp_path / "td").iterdir() if path.name.startswith(".")]


def test_processes_write_the_files_of_a_folder_together(tmp_path: Path) -> None:
    hf_dir = make_model(tmp_path / "hf", dtype="bfloat16")
    folder = to_torch_dist("--hf-checkpoint", hf_dir, "--save", tmp_path / "td")
    small_files = "import vime.models.hf_folder as h; h.MAX_SHARD_BYTES = 60_000; import runpy, sys; "
    (tmp_path / "convert.py").write_text(
        small_files + f"runpy.run_path({str(ROOT / 'tools/convert_torch_dist_to_hf.py')!r}, run_name='__main__')"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port()]
    arguments = ["--input-dir", folder, "--output-dir", tmp_path / "back", "--origin-hf-dir", hf_dir]
    result = run("env", f"PYTHONPATH={ROOT}", *torchrun, tmp_path / "convert.py", *arguments)
    assert result.returncode == 0, result.stderr
    assert "process 1 converted: " in result.stderr
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 4
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    expected = load_file(hf_dir / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_a_checkpoint_of_another_model_is_told(tmp_path: Path) -> None:
    folder = to_torch_dist("--hf-checkpoint", make_model(tmp_path / "hf"), "--save", tmp_path / "td")
    wider = make_model(tmp_path / "wider", intermediate_size=256)
    with pytest.raises(
        UserError, match=r"of another model: its .*linear_fc1.weight is \[256, 64\] instead of \[512, 64\]"
    ):
        to_hf(folder, tmp_path / "out", wider)
    with pytest.raises(UserError, match=r"it has no .*q_layernorm.weight"):
        to_hf(folder, tmp_path / "out", make_model(tmp_path / "qwen3", "qwen3"))


def test_metadata_that_would_run_code_is_not_loaded(tmp_path: Path) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.system, (f"touch {tmp_path}/ran",))

    (tmp_path / "td").mkdir()
    (tmp_path / "td" / "metadata.json").write_text("{}")
    (tmp_path / "td" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match=r"names posix\.system, which describes no tensor"):
        to_hf(tmp_path / "td", tmp_path / "out", make_model(tmp_path / "hf"))
    assert not (tmp_path / "ran").exists()


def test_metadata_that_names_a_file_elsewhere_is_not_loaded(tmp_path: Path) -> None:
    import dataclasses
    import pickle

    hf_dir = make_model(tmp_path / "hf")
    path = to_torch_dist("--hf-checkpoint", hf_dir, "--save", tmp_path / "td") / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    storage = metadata.storage_data
    for name in ("/etc/passwd", "../other.distcp"):
        elsewhere = {index: dataclasses.replace(info, relative_path=name) for index, info in storage.items()}
        path.write_bytes(pickle.dumps(dataclasses.replace(metadata, storage_data=elsewhere)))
        with pytest.raises(UserError, match=f"names a file outside of the checkpoint, {name}; not loaded"):
            to_hf(path.parent, tmp_path / "out", hf_dir)


def test_metadata_cannot_reach_what_an_allowed_module_imports(tmp_path: Path) -> None:
    """Pickle follows dots: a class of an allowed module does not stand for all that is in the module."""
    for module in ("torch.distributed.checkpoint.filesystem", "megatron.core.dist_checkpointing.strategies.torch"):
        folder = tmp_path / module
        folder.mkdir()
        (folder / "metadata.json").write_text("{}")
        name = "os.getcwd" if "filesystem" in module else "torch.os.getcwd"
        strings = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
        (folder / ".metadata").write_bytes(b"\x80\x04" + strings + b"\x93)R.")
        with pytest.raises(UserError, match=rf"names {module}\.{name}, which describes no tensor"):
            to_hf(folder, tmp_path / "out", make_model(tmp_path / "hf" / module))
