"""Megatron's model, optimizer and learning-rate scheduler, from the shape of the model and the configuration.

What the user gave as a Megatron flag (``config.megatron``) goes to the Megatron configuration classes that have a
field of its name; where vime needs a certain value, another one is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from vime.config import Config
from vime.config.foreign.megatron_lm import WITHOUT_EFFECT
from vime.config.rules import fixed
from vime.config.rules.expected import EXPECTED
from vime.errors import UserError
from vime.models import ModelShape, load_shape
from vime.platform import current
from vime.platform.megatron_adam import use_adam
from vime.platform.megatron_lists import use_lists
from vime.platform.megatron_wgrad import use_accumulating_products
from vime.training.freezing import Selection, settle_frozen
from vime.training.layers.moe import Router
from vime.training.layers.mtp import DraftBlock
from vime.training.layers.rope import Rope
from vime.training.layers.spec import Modules, decoder_spec, layer_spec, modules
from vime.training.model import PolicyModel
from vime.training.optimizer import GroupAdam, draft_groups

BuildModel = Callable[[bool, bool, int | None], Any]
"""(first stage, last stage, virtual stage) → a chunk of the model, not wrapped yet."""

Provide = Callable[[BuildModel, bool, bool, int | None], Any]
"""The same with the builder in front: what somebody makes of a chunk before it is wrapped."""

LOSS_SCALE = 2.0**16
"""Where the scale of a float16 loss starts unless --initial-loss-scale says it. From Megatron's 2^32 it takes some 18
steps of halving to come down to what float16 can hold, and each is a rollout that nothing is learned from."""

__all__ = ["actor_shape", "build_chunks", "build_optimizer", "build_scheduler", "make_rope", "transformer_config"]


def actor_shape(config: Config) -> ModelShape:
    """The model of --hf-checkpoint. Its layer for multi-token prediction is part of it where that is trained."""
    algorithm = config.algorithm
    trained = algorithm.mtp_num_layers if algorithm.enable_mtp_training else None
    return dataclasses.replace(load_shape(config.checkpoint.hf_checkpoint), trained_mtp_layers=trained or 0)


def transformer_config(shape: ModelShape, config: Config) -> TransformerConfig:
    """The model as Megatron describes it, with the layout and precision of ``config.parallel``."""
    parallel = config.parallel
    stages = parallel.pipeline_model_parallel_size
    on_cpu = current().name == "cpu"
    fields: dict[str, Any] = shape.transformer_fields() | {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "sequence_parallel": parallel.sequence_parallel,
        "pipeline_model_parallel_size": stages,
        **_interleaving_fields(parallel.virtual_stages(shape.num_layers)),
        "context_parallel_size": parallel.context_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        "recompute_granularity": parallel.recompute_granularity,
        "recompute_method": parallel.recompute_method,
        "recompute_num_layers": parallel.recompute_num_layers,
        **precision_fields(config),
        "transformer_impl": _implementation(config),
        "use_cpu_initialization": on_cpu,
        # Every weight is loaded, so initialising does nothing. It must be "performed" all the same: Megatron marks the
        # parameters that tensor parallelism shards while it does that, and counts them rightly in the gradient norm.
        **dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), _leave),
        "gradient_accumulation_fusion": _accumulating_products(config),
        "variable_seq_lengths": stages > 1,  # packs differ in length
        **fixed.MODEL,
    }
    # what describes the model is config.json's, and was compared with it
    untold = EXPECTED.keys() | WITHOUT_EFFECT.keys()
    settings = {name: value for name, value in config.megatron.items() if name not in untold}
    given = {"moe_router_bias_update_rate": 0.0} | _fields_of(TransformerConfig, settings, fields)
    return TransformerConfig(**fields | given)


def _accumulating_products(config: Config) -> bool:
    refused = config.megatron.get("gradient_accumulation_fusion") is False
    if refused or not current().fused_kernels or config.parallel.fp32:
        return False
    use_accumulating_products()
    return True


def _interleaving_fields(virtual_stages: int | None) -> dict[str, Any]:
    if virtual_stages is None:
        return {}
    return {"virtual_pipeline_model_parallel_size": virtual_stages, **fixed.INTERLEAVED}


def _leave(weight: Tensor) -> Tensor:
    return weight


def precision_fields(config: Config) -> dict[str, Any]:
    dtype = getattr(torch, config.parallel.dtype_name)
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
    }


def build_chunks(
    shape: ModelShape,
    config: Config,
    *,
    model: type[GPTModel] = PolicyModel,
    provide: Provide | None = None,
    selection: Selection | None = None,
    trainable: bool = True,
) -> list[Any]:
    """The model chunks of this rank (one, or one a virtual pipeline stage), wrapped for mixed precision and gradients.

    Weights are not initialised: load them before anything else.

    Args:
        model: the class of the model.
        provide: makes each chunk, perhaps with the builder that it gets; see ``Provide``.
        selection: which parameters are trained; None: all.
        trainable: whether there are gradients at all.
    """
    megatron = transformer_config(shape, config)
    blocks = modules(megatron.transformer_impl, grouped_experts=config.megatron.get("moe_grouped_gemm") is not False)
    stages = megatron.virtual_pipeline_model_parallel_size
    parallel_state.set_virtual_pipeline_model_parallel_world_size(stages)
    virtual: list[int | None] = [None] if stages is None else list(range(stages))
    build = _stage_builder(model, shape, config, megatron, blocks)
    chunks = [_build_chunk(build, provide, config, megatron, stage) for stage in virtual]
    if not trainable:
        return chunks
    if selection is not None:
        selection.apply(chunks, shape)
    settle_frozen(chunks, config)
    gradients = _gradient_config(config)
    wrapped = [
        DistributedDataParallel(megatron, gradients, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)
    ]
    megatron.finalize_model_grads_func = finalize_model_grads
    if gradients.overlap_grad_reduce:
        syncs = [chunk.no_sync for chunk in wrapped]
        megatron.no_sync_func = syncs[0] if len(syncs) == 1 else syncs
    return wrapped


def _stage_builder(
    kind: type[GPTModel], shape: ModelShape, config: Config, megatron: TransformerConfig, blocks: Modules
) -> BuildModel:
    fields = shape.gpt_fields()
    if blocks.rotates:  # Megatron shall not do it again
        fields["position_embedding_type"] = "none"

    def build(pre_process: bool, post_process: bool, vp_stage: int | None) -> Any:
        drafts = post_process and shape.trained_mtp_layers > 0
        model = kind(
            megatron,
            decoder_spec(shape, megatron, blocks, vp_stage),
            vocab_size=shape.padded_vocab_size(
                config.parallel.tensor_model_parallel_size, config.checkpoint.make_vocab_size_divisible_by
            ),
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            **({"draft": _draft_block(shape, megatron, blocks, vp_stage)} if drafts else {}),
            **fields,
        )
        model.tokens_in_vocabulary = shape.vocab_size
        return model

    return build


def _build_chunk(
    build: BuildModel, provide: Provide | None, config: Config, megatron: TransformerConfig, vp_stage: int | None
) -> Any:
    virtual = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    place = parallel_state.is_pipeline_first_stage(**virtual), parallel_state.is_pipeline_last_stage(**virtual)
    model = build(*place, vp_stage) if provide is None else provide(build, *place, vp_stage)
    _tell_experts_apart(model, config)
    model.to(current().device())  # Megatron makes its own layers there, ours start on the CPU
    if not (megatron.bf16 or megatron.fp16):
        return model
    wrapped = Float16Module(megatron, model)
    for module in wrapped.modules():
        if isinstance(module, Router):
            module.keep_float32()
    return wrapped


def _draft_block(shape: ModelShape, megatron: TransformerConfig, blocks: Modules, vp_stage: int | None) -> DraftBlock:
    layer = layer_spec(shape, megatron, blocks, has_experts=shape.has_experts(shape.num_layers))
    return DraftBlock(megatron, layer, blocks.norm, vp_stage)


def _tell_experts_apart(model: GPTModel, config: Config) -> None:
    """Megatron reduces the gradients of experts over groups of their own only where experts are spread over ranks.

    But where experts are cut otherwise than the rest, tensor-parallel ranks have copies of them, of different tokens:
    without this their gradients would never meet, and the copies would drift apart.
    """
    parallel = config.parallel
    if parallel.expert_tensor_parallel_size != parallel.tensor_model_parallel_size:
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.allreduce = False


def make_rope(shape: ModelShape, config: Config) -> Rope | None:
    """The rotary positions that come with each micro-batch; None when the attention modules rotate by themselves."""
    if not modules(_implementation(config)).rotates:
        return None
    return Rope(
        width=shape.rotary_width,
        base=shape.rotary_base,
        scaling=shape.rope_scaling,
        interleaved=shape.rotary_interleaved,
    )


def _implementation(config: Config) -> str:
    return str(config.megatron.get("transformer_impl", "local"))


def _gradient_config(config: Config) -> DistributedDataParallelConfig:
    fields: dict[str, Any] = {
        "use_distributed_optimizer": config.parallel.use_distributed_optimizer,
        **fixed.GRADIENTS,
    }
    return DistributedDataParallelConfig(**fields | _fields_of(DistributedDataParallelConfig, config.megatron, fields))


def build_optimizer(chunks: list[Any], config: Config) -> Any:
    """AdamW with fp32 main weights; norms and biases are not decayed. The chunks must have their weights by now."""
    use_adam(GroupAdam)
    use_lists()
    ours = config.optimizer
    precision = precision_fields(config)
    fields: dict[str, Any] = {
        "optimizer": "adam",
        "lr": ours.lr,
        "min_lr": ours.min_lr,
        "weight_decay": ours.weight_decay,
        "adam_beta1": ours.adam_beta1,
        "adam_beta2": ours.adam_beta2,
        "adam_eps": ours.adam_eps,
        "clip_grad": ours.clip_grad,
        "params_dtype": precision["params_dtype"],
        "bf16": precision["bf16"],
        "fp16": precision["fp16"],
        "use_distributed_optimizer": config.parallel.use_distributed_optimizer,
    }
    given = _fields_of(OptimizerConfig, config.megatron, fields)
    settings = OptimizerConfig(**{"initial_loss_scale": LOSS_SCALE, **fields, **given})
    groups = get_standard_config_overrides(settings) | draft_groups()
    optimizer = get_megatron_optimizer(settings, chunks, config_overrides=groups)
    for chunk in chunks:
        chunk.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def build_scheduler(optimizer: Any, config: Config, *, total_steps: int) -> OptimizerParamScheduler:
    """Learning rate by optimizer steps; one step of the scheduler is one step of the optimizer."""
    ours = config.optimizer
    decay = max(ours.lr_decay_iters or total_steps, 1)
    warmup = int(ours.lr_warmup_fraction * decay) if ours.lr_warmup_fraction is not None else ours.lr_warmup_iters
    return OptimizerParamScheduler(
        optimizer,
        init_lr=ours.lr_warmup_init,
        max_lr=ours.lr,
        min_lr=ours.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(decay, warmup + 1),
        lr_decay_style=ours.lr_decay_style,
        start_wd=ours.weight_decay,
        end_wd=ours.weight_decay,
        wd_incr_steps=max(decay, 1),
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a resumed run follows the flags that it is given
    )


def _fields_of(kind: type[Any], given: Mapping[str, Any], derived: Mapping[str, Any]) -> dict[str, Any]:
    """What the user gave for this Megatron class, without what vime derives: there its own flags decide."""
    known = {field.name for field in dataclasses.fields(kind)}
    for name in known & given.keys() & derived.keys():
        if given[name] != derived[name]:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} {given[name]} cannot be given: vime needs {derived[name]} there")
    return {name: value for name, value in given.items() if name in known and name not in derived}
