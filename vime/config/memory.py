"""What a run needs at least, by the sizes of its model: enough to refuse what cannot fit before anything starts.

Counted is what stands there all the time. Activations, caches and contexts come on top, and on GPUs keys and values;
how much they take is only known when the run is there, and is logged then (metrics ``memory/...``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vime.config.foreign import manifest

if TYPE_CHECKING:
    from vime.config.config import Config
    from vime.config.layouts import Layout
    from vime.models import ModelShape, WeightRule

__all__ = [
    "TrainerMemory",
    "beside_gpus",
    "crowding",
    "doubt_beside_gpus",
    "engine_bytes",
    "needs",
    "on_one_machine",
    "shortage",
    "trainer_memory",
]

GIB = 2**30
GRADIENT = 4  # bytes a parameter: gradients add up in float32
MOMENTS = 8  # two of AdamW, in float32
MAIN = 4  # float32 copies of parameters that are narrower
SMALLER_WEIGHTS = ("quantization", "cpu_offload_gb")
"""Flags of vLLM under which an engine's weights take another space than in the trainer's precision."""
COMPARING = 3 * GIB
"""Of a device, for the context of a training rank (2.2 seen) and its pass over one short text."""
CPU_KV_CACHE_BYTES = 512 << 20  # of an engine's process without a GPU, unless flags say otherwise
RANK_PROCESS = 0.3 * GIB  # Python with torch, Megatron and Ray: 0.32 measured
ENGINE_PROCESS = 0.6 * GIB  # vLLM on a CPU beside weights, keys and values, without what engines share; 0.97 with it


@dataclass(frozen=True, kw_only=True)
class TrainerMemory:
    """Bytes on the fullest rank."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer

    def __str__(self) -> str:
        parts = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        told = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
        return f"{self.total / GIB:.1f} GiB ({told})"


def trainer_memory(shape: ModelShape, layout: Layout, *, itemsize: int, shares_optimizer: bool) -> TrainerMemory:
    """Weights, gradients and optimizer state of one rank. Layers count as equal, and stages as even.

    Args:
        itemsize: bytes of a parameter, 2 or 4.
        shares_optimizer: over data-parallel ranks, as with --use-distributed-optimizer.
    """
    dense, experts = _parameters_of_a_rank(shape, layout)
    state = MOMENTS + (MAIN if itemsize < 4 else 0)
    dense_copies = layout.data * layout.context
    expert_copies = max(1, layout.world // (layout.pipeline * layout.expert * layout.expert_tensor_size))
    kept = dense / dense_copies + experts / expert_copies if shares_optimizer else dense + experts
    parameters = dense + experts
    return TrainerMemory(weights=itemsize * parameters, gradients=GRADIENT * parameters, optimizer=state * kept)


def engine_bytes(shape: ModelShape, *, itemsize: int, processes: int) -> float:
    """The weights in each process of an engine."""
    return itemsize * sum(_size(rule) / (processes if rule.tp_dim is not None else 1) for rule in _rules(shape))


def _parameters_of_a_rank(shape: ModelShape, layout: Layout) -> tuple[float, float]:
    """Those that every data-parallel replica has, and those of experts."""
    dense = experts = ends = 0.0
    for rule in _rules(shape):
        if rule.expert is not None:
            experts += _size(rule) / layout.expert / (layout.expert_tensor_size if rule.tp_dim is not None else 1)
            continue
        share = _size(rule) / (layout.tensor if rule.tp_dim is not None else 1)
        if rule.layer is None and rule.vocabulary:
            ends = max(ends, share) if layout.pipeline > 1 else ends + share  # one of them on each end
        else:
            dense += share
    return dense / layout.pipeline + ends, experts / layout.pipeline


def _rules(shape: ModelShape) -> Iterator[WeightRule]:
    from vime.models import weight_map

    return iter(weight_map(shape))


def _size(rule: WeightRule) -> int:
    return sum(math.prod(tensor.shape) for tensor in rule.hf)


def needs(config: Config, shape: ModelShape) -> tuple[TrainerMemory, float]:
    """Of a training rank, and bytes of weights in each process of an engine (0 in a run without engines)."""
    from vime.config.layouts import Layout

    cluster, itemsize = config.cluster, 4 if config.parallel.fp32 else 2
    trainer = trainer_memory(
        shape,
        Layout.of(config, shape),
        itemsize=itemsize,
        shares_optimizer=config.parallel.use_distributed_optimizer,
    )
    if _trains_unknown_part(config):
        trainer = dataclasses.replace(trainer, gradients=0.0, optimizer=0.0)
    engine = engine_bytes(shape, itemsize=itemsize, processes=cluster.rollout_num_gpus_per_engine)
    known = cluster.num_engines and not any(config.vllm.get(flag) for flag in SMALLER_WEIGHTS)
    return trainer, engine if known else 0.0


def _trains_unknown_part(config: Config) -> bool:
    """How much of gradients and optimizer is on the devices is not told by the sizes of the model."""
    optimizer = config.optimizer
    selected = optimizer.only_train_params_name_list or optimizer.freeze_params_name_list
    provided = config.hooks.custom_model_provider_path  # it may freeze parameters
    return bool(selected or provided or config.megatron.get("optimizer_cpu_offload"))


def shortage(config: Config, shape: ModelShape, *, gpu_bytes: int | None, host_bytes: int | None) -> str | None:
    """Why the run cannot fit, with the numbers; None if it may.

    Args:
        gpu_bytes: of each GPU; None where slots are CPU processes.
        host_bytes: what the processes may take of the one machine on which all of them run, of one with GPUs only if it
            is a limit of its container (beyond which they are killed); None where there are several machines.
    """
    trainer, engine = needs(config, shape)
    if gpu_bytes is not None:
        told = _shortage_of_gpus(config, trainer, engine, gpu_bytes) or _shortage_of_sender(
            config, shape, trainer, gpu_bytes
        )
        return told or _shortage_beside_gpus(config, shape, host_bytes)
    needed, told = on_one_machine(config, trainer, engine)
    if host_bytes is None or needed <= host_bytes:
        return None
    return f"the run needs at least {told}; this machine has {host_bytes / GIB:.1f}{_unasked(config)}"


def _shortage_beside_gpus(config: Config, shape: ModelShape, limit: int | None) -> str | None:
    needed, told = beside_gpus(config, shape)
    if limit is None or needed <= limit:
        return None
    return f"beside its GPUs the run keeps {told}; this container may take {limit / GIB:.1f}"


def doubt_beside_gpus(config: Config, shape: ModelShape, installed: int) -> str | None:
    """That the machine says that it has less than the run keeps beside its GPUs: that of some grows as it is used."""
    needed, told = beside_gpus(config, shape)
    if needed <= installed:
        return None
    return (
        f"beside its GPUs the run keeps {told}; this machine says that it has {installed / GIB:.1f}: unless that grows "
        "with use, processes will be killed"
    )


def beside_gpus(config: Config, shape: ModelShape) -> tuple[float, str]:
    """Bytes that the training ranks of a run on one machine keep in its memory at least, and how they come about: what
    leaves the GPUs, other sets of weights, and weights for engines to read."""
    trainer, _ = needs(config, shape)
    cluster, ranks = config.cluster, config.cluster.train_world_size
    leaves = trainer.weights + trainer.optimizer if cluster.offload_train and cluster.num_engines else 0.0
    parts = {"training ranks that leave their GPU": (ranks, leaves)}
    if cluster.colocate_critic:
        parts["ranks of the critic"] = (ranks, leaves)
    parts["copies of weights for a reference, a teacher or an old actor"] = (
        ranks * _weight_sets(config),
        trainer.weights,
    )
    if _shares_weights(config):
        itemsize = 4 if config.parallel.fp32 else 2
        parts["weights that engines read"] = (1, engine_bytes(shape, itemsize=itemsize, processes=1))
    needed = sum(count * size for count, size in parts.values())
    told = "; ".join(f"{count} x {size / GIB:.1f} for {what}" for what, (count, size) in parts.items() if count * size)
    return needed, f"at least {needed / GIB:.1f} GiB in the machine's memory: {told}"


def _weight_sets(config: Config) -> int:
    """Of the actor, that each of its ranks keeps."""
    teacher = config.distillation.opd_teacher_load is not None
    return config.algorithm.needs_reference + teacher + config.off_policy.keep_old_actor


def _shares_weights(config: Config) -> bool:
    """Whether engines on GPUs read their weights from the machine's memory; see ``cluster.transport``."""
    cluster, asked = config.cluster, config.engine.update_weight_transport
    lasting = config.sampling.use_fault_tolerance or not cluster.offload_train
    return cluster.num_engines > 0 and (asked == "shm" or (asked == "auto" and cluster.colocate and lasting))


def crowding(config: Config, cores: int) -> str | None:
    """That ranks without GPUs are more than the cores of their machine, if they are."""
    ranks = config.cluster.train_slots
    if ranks <= cores:
        return None
    return (
        f"{ranks} training ranks take turns on {cores} core{'s' if cores > 1 else ''}, and start one after the other"
        + _unasked(config)
    )


def _unasked(config: Config) -> str:
    """Who gave no number of ranks learns where theirs comes from."""
    if config.origins.get("actor_num_gpus_per_node") != "default":
        return ""
    return f": --actor-num-gpus-per-node is {config.cluster.actor_num_gpus_per_node} where it is not given"


def on_one_machine(config: Config, trainer: TrainerMemory, engine: float) -> tuple[float, str]:
    """Bytes that all processes of a run without GPUs hold together, and how they come about."""
    cluster = config.cluster
    ranks, engines = cluster.train_world_size, cluster.rollout_num_gpus or 0
    rank, server = trainer.total + RANK_PROCESS, engine + _keys_and_values(config) + ENGINE_PROCESS
    needed = rank * ranks + server * engines
    told = f"{needed / GIB:.1f} GiB: {ranks} x {rank / GIB:.1f} for training ranks, each with {trainer}"
    if engines:
        told += f"; {engines} x {server / GIB:.1f} for engine processes, each with {engine / GIB:.1f} GiB of weights"
    return needed, told


def _keys_and_values(config: Config) -> float:
    """Bytes in an engine's process without a GPU, as far as flags tell them."""
    asked = config.vllm.get("kv_cache_memory_bytes")
    if isinstance(asked, int):
        return asked
    return 0 if asked is not None or "gpu_memory_utilization" in config.vllm else CPU_KV_CACHE_BYTES


def _shortage_of_gpus(config: Config, trainer: TrainerMemory, engine: float, gpu_bytes: int) -> str | None:
    cluster = config.cluster
    has = f"a GPU has {gpu_bytes / GIB:.1f}"
    if trainer.total > gpu_bytes:
        return (
            f"a training rank needs at least {trainer}, and activations; {has}: use more slots with a larger "
            "--tensor-model-parallel-size or --pipeline-model-parallel-size, or --use-distributed-optimizer"
        )
    usable = _utilization(config) * gpu_bytes
    if engine > usable:
        return (
            f"an engine needs {engine / GIB:.1f} GiB for its weights on each GPU, and memory for keys and values; "
            f"--vllm-gpu-memory-utilization leaves it {usable / GIB:.1f}: a larger --rollout-num-gpus-per-engine "
            "spreads them"
        )
    keys_and_values = config.vllm.get("kv_cache_memory_bytes")
    if isinstance(keys_and_values, int):  # takes the place of the share of the GPU
        usable = engine + keys_and_values
    elif keys_and_values is not None:
        usable = engine
    stays = cluster.colocate and not (cluster.offload_train and cluster.offload_rollout)
    if stays and engine and trainer.total + usable > gpu_bytes:
        return (
            f"--colocate without both offloads: a training rank needs at least {trainer} beside the engine's "
            f"{usable / GIB:.1f} (--vllm-gpu-memory-utilization); {has}"
        )
    meets = cluster.colocate and cluster.offload_train and cluster.offload_rollout
    if meets and engine and trainer.weights + usable + COMPARING > gpu_bytes:
        return (
            f"after a sync log-probs are compared: then a training rank has its weights of {trainer.weights / GIB:.1f} "
            f"GiB, and {COMPARING / GIB:.0f} more, beside the engine's {usable / GIB:.1f}; {has}: "
            + _what_leaves_room(config, engine, trainer.weights, gpu_bytes)
        )
    return None


def _shortage_of_sender(config: Config, shape: ModelShape, trainer: TrainerMemory, gpu_bytes: int) -> str | None:
    """What the first rank lacks to send weights over a process group, as to engines on GPUs of their own."""
    cluster, engine = config.cluster, config.engine
    if cluster.colocate or not cluster.num_engines or engine.update_weight_transport not in ("auto", "nccl"):
        return None
    itemsize = 4 if config.parallel.fp32 else 2
    sizes = [itemsize * math.prod(tensor.shape) for rule in _rules(shape) for tensor in rule.hf]
    bucket = max(*sizes, min(engine.update_weight_buffer_size, sum(sizes)))
    buckets = min(2 * bucket, sum(sizes))  # one is packed while the other is sent
    if trainer.total + buckets <= gpu_bytes:
        return None
    return (
        f"to send weights the first training rank needs {buckets / GIB:.1f} GiB beside its {trainer}; a GPU has "
        f"{gpu_bytes / GIB:.1f}: use more slots with a larger --tensor-model-parallel-size, or a smaller "
        "--update-weight-buffer-size where no tensor is larger"
    )


def _what_leaves_room(config: Config, engine: float, weights: float, gpu_bytes: int) -> str:
    """For the trainer's weights beside an engine."""
    left = gpu_bytes - weights - COMPARING
    if left <= engine:
        return "use more slots with a larger --tensor-model-parallel-size and --rollout-num-gpus-per-engine"
    if config.vllm.get("kv_cache_memory_bytes") is not None:
        return f"--vllm-kv-cache-memory-bytes {int(left - engine)} leaves room"
    return f"--vllm-gpu-memory-utilization {math.floor(100 * left / gpu_bytes) / 100:g} leaves room"


def _utilization(config: Config) -> float:
    """The share of a GPU that an engine takes."""
    given = config.vllm.get("gpu_memory_utilization")
    return float(manifest("vllm")["gpu-memory-utilization"].default if given is None else given)
