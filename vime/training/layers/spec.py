"""The decoder layer, put together from Megatron's parts and vime's.

Parameter names do not depend on the choice of modules: norm and linear stay apart also with Transformer Engine, whose
fused module would rename the norm's weight.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from vime.models import ModelShape
from vime.training.layers.attention import Attention
from vime.training.layers.experts import GroupedExperts
from vime.training.layers.mla import LatentAttention, LatentSubmodules
from vime.training.layers.mlp import GatedMlp
from vime.training.layers.moe import MoeTransformerLayer, moe_spec
from vime.training.layers.norm import Norm
from vime.training.layers.sandwich import SandwichLayer
from vime.training.layers.self_attention import self_attention

__all__ = ["Modules", "decoder_spec", "layer_spec", "modules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """The building blocks of a layer."""

    column_linear: type[Any] = ColumnParallelLinear
    row_linear: type[Any] = RowParallelLinear
    norm: type[Any] = Norm
    attention: type[Any] = Attention
    experts: type[SequentialMLP] = GroupedExperts

    @property
    def rotates(self) -> bool:
        """Whether the attention applies the rotary positions itself, from the segments."""
        return self.attention is Attention


def modules(implementation: str = "local", *, grouped_experts: bool = True) -> Modules:
    """The blocks of ``--transformer-impl``: "local" runs everywhere, "transformer_engine" needs that package.

    Args:
        grouped_experts: whether experts are computed together where kernels can do that (``--moe-grouped-gemm``).

    Raises:
        ValueError: transformer_engine is asked for and not installed.
    """
    if implementation != "transformer_engine":
        return Modules(experts=GroupedExperts if grouped_experts else SequentialMLP)
    if importlib.util.find_spec("transformer_engine") is None:
        raise ValueError("--transformer-impl transformer_engine: the package transformer-engine is not installed")
    from megatron.core.extensions import transformer_engine as te

    return Modules(
        column_linear=te.TEColumnParallelLinear,
        row_linear=te.TERowParallelLinear,
        norm=te.TENorm,
        attention=te.TEDotProductAttention,
        experts=SequentialMLP,
    )


def decoder_spec(
    shape: ModelShape, config: TransformerConfig, blocks: Modules, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage and the last norm."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    layers = [layer_spec(shape, config, blocks, has_experts=shape.has_experts(number)) for number in numbers]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=blocks.norm)


def layer_spec(shape: ModelShape, config: TransformerConfig, blocks: Modules, *, has_experts: bool) -> ModuleSpec:
    """One layer, with a mixture of experts or an ordinary MLP."""
    assert not (has_experts and shape.post_norms), "no family has both"
    plain = SandwichLayer if shape.post_norms else TransformerLayer
    mlp = MLPSubmodules(linear_fc1=blocks.column_linear, linear_fc2=blocks.row_linear)
    return ModuleSpec(
        module=MoeTransformerLayer if has_experts else plain,
        params={"post_norm": blocks.norm} if shape.post_norms else {},
        submodules=TransformerLayerSubmodules(
            input_layernorm=blocks.norm,
            self_attention=_latent_attention(shape, blocks) if shape.mla else _attention(config, blocks),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=blocks.norm,
            mlp=moe_spec(mlp, blocks.experts) if has_experts else ModuleSpec(module=GatedMlp, submodules=mlp),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention(config: TransformerConfig, blocks: Modules) -> ModuleSpec:
    head_norm = blocks.norm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=self_attention(),
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=blocks.column_linear,
            core_attention=blocks.attention,
            linear_proj=blocks.row_linear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _latent_attention(shape: ModelShape, blocks: Modules) -> ModuleSpec:
    return ModuleSpec(
        module=LatentAttention,
        params={"mla": shape.mla, "softmax_factor": shape.softmax_factor},
        submodules=LatentSubmodules(column_linear=blocks.column_linear, row_linear=blocks.row_linear, norm=blocks.norm),
    )
