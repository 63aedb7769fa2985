"""Slots, parallel sizes and what can be combined."""

from __future__ import annotations

from collections.abc import Iterator

from vime.config.config import Config
from vime.config.rules.base import Violation, known


def training_slots(config: Config) -> Iterator[Violation]:
    world, model = config.cluster.train_world_size, config.parallel.model_parallel_size
    if world >= 1 and model >= 1 and world % model:
        yield Violation(
            f"{world} training slots (--actor-num-nodes x --actor-num-gpus-per-node) must be a multiple of "
            f"tensor x pipeline x context parallel size = {model}"
        )


def engine_slots(config: Config) -> Iterator[Violation]:
    cluster = config.cluster
    slots, each, node = cluster.rollout_num_gpus, cluster.rollout_num_gpus_per_engine, cluster.num_gpus_per_node
    if not known(slots) or each < 1:
        return
    if slots % each:
        below = slots - slots % each
        offer = f"{below} or {below + each}" if below else str(each)
        source = "training slots under --colocate" if cluster.colocate else "--rollout-num-gpus"
        yield Violation(
            f"{source} {slots} must be a multiple of --rollout-num-gpus-per-engine {each}, e.g. {offer}",
            ("rollout_num_gpus", "rollout_num_gpus_per_engine"),
        )
    if slots == 0 and not config.ops.debug_train_only:
        yield Violation(
            "--rollout-num-gpus 0 leaves no engine; only --debug-train-only runs without", ("rollout_num_gpus",)
        )
    if each > node >= 1 and each % node:
        yield Violation(
            f"--rollout-num-gpus-per-engine {each} must fit into a node (--num-gpus-per-node {node}) "
            "or be a multiple of it"
        )


def node_slots(config: Config) -> Iterator[Violation]:
    each, node = config.cluster.actor_num_gpus_per_node, config.cluster.num_gpus_per_node
    if each > node >= 1:
        yield Violation(f"--actor-num-gpus-per-node {each} is more than a node has (--num-gpus-per-node {node})")


def sequence_parallel(config: Config) -> Iterator[Violation]:
    if config.parallel.sequence_parallel and config.parallel.tensor_model_parallel_size == 1:
        yield Violation("--sequence-parallel needs --tensor-model-parallel-size above 1")


def precision(config: Config) -> Iterator[Violation]:
    parallel = config.parallel
    chosen = [name for name in ("bf16", "fp16", "fp32") if getattr(parallel, name)]
    if len(chosen) != 1:
        said = " and ".join(f"--{name}" for name in chosen) or "none"
        yield Violation(f"exactly one of --bf16, --fp16 and --fp32 must hold, not {said}", ("bf16", "fp16", "fp32"))


def recomputation(config: Config) -> Iterator[Violation]:
    parallel = config.parallel
    granularity = parallel.recompute_granularity
    missing = [name for name in ("recompute_method", "recompute_num_layers") if getattr(parallel, name) is None]
    if granularity == "full" and missing:
        flags = " and ".join("--" + name.replace("_", "-") for name in missing)
        yield Violation(f"--recompute-granularity full needs {flags}, e.g. uniform and 1", tuple(missing))
    if granularity != "full" and parallel.recompute_method is not None:
        yield Violation("--recompute-method needs --recompute-granularity full", ("recompute_granularity",))


def debug_modes(config: Config) -> Iterator[Violation]:
    ops = config.ops
    if ops.debug_rollout_only and ops.debug_train_only:
        cause = "--load-debug-rollout-data" if ops.load_debug_rollout_data else "--debug-train-only"
        yield Violation(f"--debug-rollout-only and {cause} exclude each other")
    if ops.debug_train_only and ops.load_debug_rollout_data is None:
        yield Violation("--debug-train-only needs --load-debug-rollout-data: what to train on")


def learning_rate(config: Config) -> Iterator[Violation]:
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield Violation(f"--min-lr {optimizer.min_lr:g} is above --lr {optimizer.lr:g}", ("lr", "min_lr"))
    if optimizer.lr_warmup_fraction is not None and optimizer.lr_warmup_iters:
        yield Violation("--lr-warmup-fraction and --lr-warmup-iters exclude each other")


def one_kl(config: Config) -> Iterator[Violation]:
    algorithm = config.algorithm
    if algorithm.kl_coef and algorithm.kl_loss_coef:
        yield Violation(
            f"--kl-coef {algorithm.kl_coef:g} (in the reward) and --kl-loss-coef {algorithm.kl_loss_coef:g} "
            "(in the loss) exclude each other"
        )


RULES = (
    training_slots,
    engine_slots,
    node_slots,
    sequence_parallel,
    precision,
    recomputation,
    debug_modes,
    learning_rate,
    one_kl,
)
