"""What a run needs at least, against numbers that were measured or worked out by hand."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.harness import config_of
from vime.config import Config, resolve
from vime.config.layouts import Layout
from vime.config.memory import (
    COMPARING,
    GIB,
    TrainerMemory,
    beside_gpus,
    crowding,
    doubt_beside_gpus,
    engine_bytes,
    on_one_machine,
    shortage,
    trainer_memory,
)
from vime.models import ModelShape, load_shape

CONFIGS = Path(__file__).parents[1] / "models" / "public_configs"
QWEN3_4B = 4.022e9  # parameters, the tied embedding once
MOE_EXPERTS = 48 * 128 * 3 * 2048 * 768  # of Qwen3-30B-A3B
GPU = 141 * 10**9


@functools.cache
def shape_of(name: str) -> ModelShape:
    with tempfile.TemporaryDirectory() as folder:
        public = json.loads((CONFIGS / f"{name}.json").read_text())
        Path(folder, "config.json").write_text(json.dumps(public["config"]))
        return load_shape(folder)


def memory(name: str, *, shares: bool = False, itemsize: int = 2, **layout: int) -> TrainerMemory:
    return trainer_memory(shape_of(name), Layout(**layout), itemsize=itemsize, shares_optimizer=shares)


def test_a_parameter_takes_18_bytes_in_bfloat16() -> None:
    """Itself 2, its gradient 4, main weight and moments 12: 67 GiB of the 4B shape, of which 71 were seen in use."""
    found = memory("qwen3-4B", world=1)
    assert found.weights == pytest.approx(2 * QWEN3_4B, rel=1e-3)
    assert found.total == pytest.approx(18 * QWEN3_4B, rel=1e-3)
    assert found.total / GIB == pytest.approx(67.4, abs=0.2)


def test_in_float32_there_are_no_main_weights() -> None:
    assert memory("qwen3-4B", world=1, itemsize=4).total == pytest.approx(16 * QWEN3_4B, rel=1e-3)


def test_data_parallel_ranks_share_the_optimizer_where_they_may() -> None:
    alone, shared = memory("qwen3-4B", world=4), memory("qwen3-4B", world=4, shares=True)
    assert shared.weights == alone.weights
    assert shared.optimizer == pytest.approx(alone.optimizer / 4)


def test_tensor_parallel_ranks_share_all_but_norms_and_stages_share_layers() -> None:
    assert memory("qwen3-4B", world=2, tensor=2).weights == pytest.approx(QWEN3_4B, rel=1e-3)
    embedding = 151936 * 2560
    stages = memory("qwen3-4B", world=2, pipeline=2).weights
    assert stages == pytest.approx(2 * ((QWEN3_4B - embedding) / 2 + embedding), rel=1e-3)


def test_experts_are_spread_over_their_own_ranks() -> None:
    whole, spread = memory("qwen3-30B-A3B", world=8), memory("qwen3-30B-A3B", world=8, expert=8)
    assert whole.weights - spread.weights == pytest.approx(2 * MOE_EXPERTS * 7 / 8, rel=1e-6)


def test_processes_of_an_engine_share_its_weights() -> None:
    shape = shape_of("qwen3-4B")
    assert engine_bytes(shape, itemsize=2, processes=1) == pytest.approx(2 * QWEN3_4B, rel=1e-3)
    assert engine_bytes(shape, itemsize=2, processes=2) == pytest.approx(QWEN3_4B, rel=1e-3)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    from tests.tiny import make_model

    model = make_model(tmp_path / "model", "llama", tied=True)
    return lambda *flags: config_of(model, *flags)


def told(config: Config, name: str = "qwen3-4B", gpu: int | None = GPU, host: int | None = None) -> str:
    return shortage(config, shape_of(name), gpu_bytes=gpu, host_bytes=host) or ""


def test_what_fits_is_not_refused(config: Callable[..., Config]) -> None:
    assert told(config()) == ""
    assert told(config("--colocate")) == ""
    assert told(config(), gpu=None, host=None) == "", "nothing is known of the machines"


def test_a_trainer_that_cannot_fit_is_refused_with_the_numbers(config: Callable[..., Config]) -> None:
    assert told(config(), gpu=40 * 2**30) == (
        "a training rank needs at least 67.4 GiB (weights 7.5, gradients 15.0, optimizer 45.0), and activations; a GPU "
        "has 40.0: use more slots with a larger --tensor-model-parallel-size or --pipeline-model-parallel-size, or "
        "--use-distributed-optimizer"
    )


def test_an_engine_that_cannot_fit_is_refused_with_the_numbers(config: Callable[..., Config]) -> None:
    assert "an engine needs 7.5 GiB for its weights on each GPU" in told(
        config("--vllm-gpu-memory-utilization", "0.05")
    )


def test_a_trainer_that_sends_weights_has_room_for_two_buckets(config: Callable[..., Config]) -> None:
    """The largest tensor, the embedding of 151936 x 2560, is larger than the 512 MiB of a bucket: 0.72 GiB, twice."""
    assert told(config(), gpu=int(68.5 * GIB)) == (
        "to send weights the first training rank needs 1.4 GiB beside its 67.4 GiB (weights 7.5, gradients 15.0, "
        "optimizer 45.0); a GPU has 68.5: use more slots with a larger --tensor-model-parallel-size, or a smaller "
        "--update-weight-buffer-size where no tensor is larger"
    )
    assert told(config("--update-weight-buffer-size", str(2**30)), gpu=69 * 2**30).startswith(
        "to send weights the first"
    )
    assert told(config(), gpu=69 * 2**30) == ""
    disk = ("--update-weight-transport", "disk", "--update-weight-disk-dir", "/tmp/weights")
    for elsewhere in (("--colocate",), disk):
        assert "to send weights" not in told(config(*elsewhere), gpu=int(68.5 * GIB))


def test_without_offloading_trainer_and_engine_must_fit_together(config: Callable[..., Config]) -> None:
    flags = ["--colocate", "--no-offload-train", "--vllm-gpu-memory-utilization", "0.6"]
    assert told(config(*flags)).startswith("--colocate without both offloads: a training rank needs at least 67.4 GiB")
    assert told(config(*flags[:2], "--vllm-gpu-memory-utilization", "0.3")) == ""


def test_on_cpus_all_processes_share_the_machine(config: Callable[..., Config]) -> None:
    assert told(config(), gpu=None, host=32 * 2**30) == (
        "the run needs at least 76.3 GiB: 1 x 67.7 for training ranks, each with 67.4 GiB (weights 7.5, "
        "gradients 15.0, optimizer 45.0); 1 x 8.6 for engine processes, each with 7.5 GiB of weights; this machine "
        "has 32.0"
    )


def test_on_cpus_every_rank_is_counted_and_the_default_number_is_named(tmp_path: Path) -> None:
    """134.5M parameters of 18 bytes and Python are 2.6 GiB, eight times; engines have 512 MiB for keys and values."""
    from tests.tiny import make_model

    words = ["--hf-checkpoint", str(make_model(tmp_path / "model", "llama", tied=True)), "--prompt-data", "x.jsonl"]
    config = resolve([*words, "--colocate", "--rm-type", "f1"]).config
    found = told(config, "smollm2-135M", gpu=None, host=23 * 2**30)
    assert found.startswith(
        "the run needs at least 31.2 GiB: 8 x 2.6 for training ranks, each with 2.3 GiB (weights 0.3"
    )
    assert found.endswith(
        "; 8 x 1.4 for engine processes, each with 0.3 GiB of weights; this machine has 23.0: "
        "--actor-num-gpus-per-node is 8 where it is not given"
    )
    assert crowding(config, 2) == (
        "8 training ranks take turns on 2 cores, and start one after the other: "
        "--actor-num-gpus-per-node is 8 where it is not given"
    )
    assert crowding(config, 8) is None


def test_keys_and_values_of_an_engine_without_a_gpu_are_what_the_flags_say(config: Callable[..., Config]) -> None:
    def engine(*flags: str) -> float:
        found = config(*flags)
        return on_one_machine(found, TrainerMemory(weights=0, gradients=0, optimizer=0), 0)[0] / GIB - 0.9

    assert engine() == pytest.approx(0.5)
    assert engine("--vllm-kv-cache-memory-bytes", str(4 * 2**30)) == pytest.approx(4)
    assert engine("--vllm-gpu-memory-utilization", "0.5") == pytest.approx(0), "not known here"


@pytest.mark.parametrize("flags", [["--only-train-params-name-list", "final_layernorm"], ["--optimizer-cpu-offload"]])
def test_what_is_not_known_of_gradients_and_optimizer_refuses_nothing(
    config: Callable[..., Config], flags: list[str]
) -> None:
    assert told(config(*flags), gpu=40 * 2**30) == ""
    assert "weights 7.5, gradients 0.0" in told(config(*flags), gpu=7 * 2**30)


def test_an_engine_whose_weights_are_smaller_than_the_model_is_not_judged(config: Callable[..., Config]) -> None:
    flags = ["--vllm-gpu-memory-utilization", "0.05"]
    assert told(config(*flags)) != ""
    assert told(config(*flags, "--vllm-quantization", "fp8")) == ""


def test_a_size_of_keys_and_values_takes_the_place_of_the_share_of_a_gpu(config: Callable[..., Config]) -> None:
    flags = ["--colocate", "--no-offload-train", "--vllm-kv-cache-memory-bytes"]
    assert told(config(*flags, str(4 * 2**30))) == ""
    assert "beside the engine's 87.5 " in told(config(*flags, str(80 * 2**30)))


QWEN3_8B = 8.19e9  # parameters: 15.3 GiB in 16 bits
H200 = 143771 << 20  # as nvidia-smi tells it: 140.4 GiB
EIGHT = ["--actor-num-gpus-per-node", "8", "--rollout-num-gpus", "8", "--colocate"]


def test_an_engine_takes_the_share_that_vllm_would_take_by_itself(config: Callable[..., Config]) -> None:
    """0.92 of 140.4 in the version that the manifest of its flags is of."""
    assert "beside the engine's 129.2" in told(config("--colocate", "--no-offload-train"), gpu=H200)


def test_the_weights_have_room_beside_awake_engines_to_be_compared(config: Callable[..., Config]) -> None:
    """Two GPUs with half of the optimizer each: 15.3 of weights, 129.2 of an engine, 3 for the pass; 122.1 are left,
    which are 0.869 of 140.4."""
    flags = ["--colocate", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2", "--use-distributed-optimizer"]
    assert told(config(*flags), "qwen3-8B", gpu=H200) == (
        "after a sync log-probs are compared: then a training rank has its weights of 15.3 GiB, and 3 more, beside the "
        "engine's 129.2; a GPU has 140.4: --vllm-gpu-memory-utilization 0.86 leaves room"
    )
    assert told(config(*flags, "--vllm-gpu-memory-utilization", "0.86"), "qwen3-8B", gpu=H200) == ""
    assert told(config(*flags, "--vllm-gpu-memory-utilization", "0.87"), "qwen3-8B", gpu=H200) != ""
    assert told(config(*flags[1:]), "qwen3-8B", gpu=H200) == "", "they have GPUs of their own"


def test_where_not_even_both_weights_have_room_more_slots_share_them(config: Callable[..., Config]) -> None:
    flags = ["--colocate", "--actor-num-gpus-per-node", "8", "--rollout-num-gpus", "8", "--use-distributed-optimizer"]
    found = told(config(*flags, "--optimizer-cpu-offload"), "qwen3-8B", gpu=30 * 2**30)
    assert found.endswith(
        "a GPU has 30.0: use more slots with a larger --tensor-model-parallel-size and --rollout-num-gpus-per-engine"
    )


def test_a_size_of_keys_and_values_that_leaves_room_is_named(config: Callable[..., Config]) -> None:
    flags = ["--colocate", "--vllm-kv-cache-memory-bytes"]
    found = told(config(*flags, str(125 * 2**30)), gpu=H200)
    fitting = found.removesuffix(" leaves room").rpartition(" ")[2]
    assert int(fitting) / GIB == pytest.approx(140.4 - 3 - 2 * 7.49, abs=0.1)
    assert told(config(*flags, fitting), gpu=H200) == ""


@pytest.mark.parametrize("name", ["4B-1gpu", "4B", "30B-A3B"])
def test_the_scripts_leave_room_to_compare_on_gpus_of_80_gb(name: str) -> None:
    script = (Path(__file__).parents[2] / "scripts" / f"run-qwen3-{name}.sh").read_text()

    def said(flag: str, default: str = "1") -> str:
        found = re.search(rf"^ +--{flag} (\S+)", script, re.MULTILINE)
        return found[1] if found else default

    weights = memory(
        f"qwen3-{name.removesuffix('-1gpu')}",
        world=int(said("actor-num-gpus-per-node")),
        tensor=int(said("tensor-model-parallel-size")),
        expert=int(said("expert-model-parallel-size")),
        expert_tensor=1,
    ).weights
    assert weights + COMPARING < (1 - float(said("vllm-gpu-memory-utilization", "0.92"))) * 80 * GIB


def test_what_ranks_keep_beside_their_gpus_is_the_sum_of_all(config: Callable[..., Config]) -> None:
    """Of each of eight ranks weights of 7.5 GiB and an optimizer of 45, and a reference of 7.5: 480 together."""
    found = config(*EIGHT, "--use-kl-loss", "--ref-load", str(Path(config().checkpoint.hf_checkpoint)))
    needed, said = beside_gpus(found, shape_of("qwen3-4B"))
    assert needed == pytest.approx(8 * 16 * QWEN3_4B, rel=1e-3)
    assert said == (
        "at least 479.5 GiB in the machine's memory: 8 x 52.4 for training ranks that leave their GPU; 8 x 7.5 for "
        "copies of weights for a reference, a teacher or an old actor"
    )


def test_weights_that_engines_read_from_memory_are_there_once(config: Callable[..., Config]) -> None:
    def gib(*flags: str) -> float:
        return beside_gpus(config(*EIGHT, *flags), shape_of("qwen3-4B"))[0] / GIB

    assert gib("--no-offload-train", "--no-offload-rollout") == pytest.approx(7.5, abs=0.05), "auto is shm then"
    assert gib("--update-weight-transport", "shm") - gib() == pytest.approx(7.5, abs=0.05)


def test_only_a_limit_of_the_container_refuses_what_is_kept_beside_gpus(config: Callable[..., Config]) -> None:
    """A machine may have more than it says before its memory is used."""
    found = config(*EIGHT)
    assert told(found, gpu=H200, host=64 * 2**30) == (
        "beside its GPUs the run keeps at least 419.6 GiB in the machine's memory: 8 x 52.4 for training ranks that "
        "leave their GPU; this container may take 64.0"
    )
    assert told(found, gpu=H200, host=None) == told(found, gpu=H200, host=500 * 2**30) == ""
    assert doubt_beside_gpus(found, shape_of("qwen3-4B"), 31 * 2**30) == (
        "beside its GPUs the run keeps at least 419.6 GiB in the machine's memory: 8 x 52.4 for training ranks that "
        "leave their GPU; this machine says that it has 31.0: unless that grows with use, processes will be killed"
    )
    assert doubt_beside_gpus(found, shape_of("qwen3-4B"), 500 * 2**30) is None


def test_a_trainer_that_stays_keeps_nothing_beside_its_gpus(config: Callable[..., Config]) -> None:
    assert beside_gpus(config(), shape_of("qwen3-4B"))[0] == 0
