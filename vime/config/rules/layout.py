"""Slots, parallel sizes and what can be combined."""

from __future__ import annotations

from collections.abc import Iterator

from vime.config.config import Config
from vime.config.layouts import Layout, chunk_layers, described, nearest, problems
from vime.config.rules.base import Violation, known, option
from vime.config.rules.batches import uneven_shares
from vime.config.rules.model import shape_or_none


def layout(config: Config) -> Iterator[Violation]:
    """All reasons in one line, with what would work instead."""
    shape = shape_or_none(config)
    given = Layout.of(config, shape)
    if given.world < 1 or min(_sizes(given)) < 1:
        return
    reasons = list(problems(given, shape))
    if reasons:
        found = nearest(given, shape, fits=lambda each: uneven_shares(config, each) is None)
        yield Violation(f"{'; '.join(reasons)}; nearest that work: {described(given, found)}")


def _sizes(layout: Layout) -> tuple[int, ...]:
    return layout.tensor, layout.pipeline, layout.virtual, layout.context, layout.expert, layout.expert_tensor_size


def virtual_stages(config: Config) -> Iterator[Violation]:
    """The number of pieces, or the layers of each."""
    parallel, shape = config.parallel, shape_or_none(config)
    each, stages = parallel.num_layers_per_virtual_pipeline_stage, parallel.pipeline_model_parallel_size
    if each is None:
        return
    if parallel.virtual_pipeline_model_parallel_size is not None:
        yield Violation(
            "--num-layers-per-virtual-pipeline-stage and --virtual-pipeline-model-parallel-size exclude each other"
        )
    if each < 1 or stages < 1 or shape is None:
        return
    if stages == 1:
        yield Violation(f"--num-layers-per-virtual-pipeline-stage {each} needs --pipeline-model-parallel-size above 1")
    elif shape.num_layers % (stages * each):
        yield Violation(
            f"--num-layers-per-virtual-pipeline-stage {each} x --pipeline-model-parallel-size {stages} = "
            f"{stages * each} does not divide the model's {shape.num_layers} layers"
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
    if slots == 0 and config.has_engines:
        yield Violation(
            "--rollout-num-gpus 0 leaves no engine; only --debug-train-only runs without", ("rollout_num_gpus",)
        )
    if each > node >= 1:
        yield Violation(
            f"--rollout-num-gpus-per-engine {each} is more than a node has (--num-gpus-per-node {node}): this version "
            "runs an engine on one node"
        )


def node_slots(config: Config) -> Iterator[Violation]:
    each, node = config.cluster.actor_num_gpus_per_node, config.cluster.num_gpus_per_node
    if each > node >= 1:
        yield Violation(f"--actor-num-gpus-per-node {each} is more than a node has (--num-gpus-per-node {node})")


def overlaps(config: Config) -> Iterator[Violation]:
    """Megatron gathers parameters ahead of their use only where the distributed optimizer has cut them up."""
    if not config.megatron.get("overlap_param_gather"):
        return
    missing = [] if config.parallel.use_distributed_optimizer else ["--use-distributed-optimizer"]
    missing += [] if config.megatron.get("overlap_grad_reduce") else ["--overlap-grad-reduce"]
    if missing:
        yield Violation(f"--overlap-param-gather needs {' and '.join(missing)}")


def transformer_engine(config: Config) -> Iterator[Violation]:
    """Its attention cuts each sequence over context-parallel ranks; our packs are cut as a whole."""
    size = config.parallel.context_parallel_size
    if size > 1 and config.megatron.get("transformer_impl") == "transformer_engine":
        yield Violation(
            f"--context-parallel-size {size} needs --transformer-impl local: Transformer Engine cuts otherwise"
        )


def low_precision(config: Config) -> Iterator[Violation]:
    """Only Transformer Engine's layers read what Megatron is told of 8 and 4 bits."""
    if config.megatron.get("transformer_impl") == "transformer_engine":
        return
    for name, value in config.megatron.items():
        if value is not None and value is not False and {"fp8", "fp4"} & set(name.split("_")):
            said = option(name) if value is True else f"{option(name)} {value}"
            yield Violation(f"{said} needs --transformer-impl transformer_engine: other layers ignore it")


def precision(config: Config) -> Iterator[Violation]:
    parallel = config.parallel
    chosen = [name for name in ("bf16", "fp16", "fp32") if getattr(parallel, name)]
    if len(chosen) != 1:
        said = " and ".join(f"--{name}" for name in chosen) or "none"
        yield Violation(f"exactly one of --bf16, --fp16 and --fp32 must hold, not {said}", ("bf16", "fp16", "fp32"))


ENGINE_DTYPES = {"half": "float16", "float": "float32"}
"""vLLM's other names of types."""


def engine_precision(config: Config) -> Iterator[Violation]:
    """Weights go over as they are; and two types on two sides would differ by more than the rounding of either."""
    given, dtype = config.vllm.get("dtype"), config.parallel.dtype_name
    if given is not None and ENGINE_DTYPES.get(given, given) != dtype:
        flag = {"float16": "--fp16", "float32": "--fp32", "bfloat16": "--bf16"}.get(ENGINE_DTYPES.get(given, given))
        advice = f"; {flag} is for both" if flag else ""
        yield Violation(
            f"--vllm-dtype {given} must be {dtype}, in which the trainer computes{advice}",
            ("bf16", "fp16", "fp32"),
        )


def accumulating_products(config: Config) -> Iterator[Violation]:
    """The product adds to a float32 buffer what it makes of narrower numbers. Whether there is a GPU is known later."""
    if config.parallel.fp32 and config.megatron.get("gradient_accumulation_fusion"):
        yield Violation("--gradient-accumulation-fusion needs --bf16 or --fp16: with --fp32 there is nothing to widen")


def recomputation(config: Config) -> Iterator[Violation]:
    parallel = config.parallel
    granularity = parallel.recompute_granularity
    missing = [name for name in ("recompute_method", "recompute_num_layers") if getattr(parallel, name) is None]
    if granularity == "full" and missing:
        flags = " and ".join(map(option, missing))
        yield Violation(f"--recompute-granularity full needs {flags}, e.g. uniform and 1", tuple(missing))
    if granularity != "full":
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(parallel, name) is not None:
                yield Violation(f"{option(name)} needs --recompute-granularity full", ("recompute_granularity",))
    if granularity != "selective" and config.megatron.get("recompute_modules") is not None:
        yield Violation("--recompute-modules needs --recompute-granularity selective", ("recompute_granularity",))


def recomputed_units(config: Config) -> Iterator[Violation]:
    """Megatron would look for layers behind the last one."""
    parallel, shape = config.parallel, shape_or_none(config)
    size, layout = parallel.recompute_num_layers, Layout.of(config, shape)
    if parallel.recompute_method != "uniform" or not size or size < 1 or shape is None or any(problems(layout, shape)):
        return
    missed = [count for count in chunk_layers(layout, shape.num_layers) if count % size]
    if missed:
        yield Violation(
            f"--recompute-method uniform with --recompute-num-layers {size} does not divide the {missed[0]} layers of "
            "a pipeline stage; block takes any number",
            ("recompute_num_layers",),
        )


def learning_rate(config: Config) -> Iterator[Violation]:
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield Violation(f"--min-lr {optimizer.min_lr:g} is above --lr {optimizer.lr:g}", ("lr", "min_lr"))
    if optimizer.lr_warmup_fraction is not None and optimizer.lr_warmup_iters:
        yield Violation("--lr-warmup-fraction and --lr-warmup-iters exclude each other")


RULES = (
    virtual_stages,
    layout,
    engine_slots,
    node_slots,
    overlaps,
    transformer_engine,
    low_precision,
    precision,
    engine_precision,
    accumulating_products,
    recomputation,
    recomputed_units,
    learning_rate,
)
