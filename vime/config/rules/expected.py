"""What MODEL_ARGS must say of a model: its config.json decides, the flags only repeat it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vime.models import ModelShape

__all__ = ["EXPECTED", "Expected", "agrees"]


@dataclass(frozen=True, slots=True)
class Expected:
    """One flag of MODEL_ARGS."""

    flag: str
    of: Callable[[ModelShape], Any]  # what the model says


def _of(name: str) -> Callable[[ModelShape], Any]:
    return lambda shape: getattr(shape, name)


def _of_experts(name: str) -> Callable[[ModelShape], Any]:
    return lambda shape: None if shape.moe is None else getattr(shape.moe, name)


def _of_latents(name: str) -> Callable[[ModelShape], Any]:
    return lambda shape: None if shape.mla is None else getattr(shape.mla, name)


def _of_yarn(name: str) -> Callable[[ModelShape], Any]:
    def value(shape: ModelShape) -> Any:
        from vime.models.shape import YarnScaling

        return getattr(shape.rope_scaling, name) if isinstance(shape.rope_scaling, YarnScaling) else None

    return value


def _llama3_factor(shape: ModelShape) -> float | None:
    from vime.models import RopeScaling

    return shape.rope_scaling.factor if isinstance(shape.rope_scaling, RopeScaling) else None


def _softmax_before_choice(shape: ModelShape) -> bool | None:
    """None without softmax: there the flag says nothing."""
    moe = shape.moe
    return None if moe is None or moe.score_function != "softmax" else not moe.normalize_weights


def _expert_layers(shape: ModelShape) -> list[int] | None:
    """1 for each layer with experts, 0 for each without."""
    moe = shape.moe
    return None if moe is None else [int(layer not in moe.dense_layers) for layer in range(shape.num_layers)]


EXPECTED: Mapping[str, Expected] = {
    "num_layers": Expected("--num-layers", _of("num_layers")),
    "hidden_size": Expected("--hidden-size", _of("hidden_size")),
    "ffn_hidden_size": Expected("--ffn-hidden-size", _of("ffn_hidden_size")),
    "num_attention_heads": Expected("--num-attention-heads", _of("num_attention_heads")),
    "num_query_groups": Expected("--num-query-groups", _of("num_query_groups")),
    "kv_channels": Expected("--kv-channels", _of("kv_channels")),
    "layernorm_epsilon": Expected("--norm-epsilon", _of("norm_epsilon")),
    "qk_layernorm": Expected("--qk-layernorm", _of("qk_layernorm")),
    "add_qkv_bias": Expected("--add-qkv-bias", _of("add_qkv_bias")),
    "post_self_attn_layernorm": Expected("--post-self-attn-layernorm", _of("post_norms")),
    "post_mlp_layernorm": Expected("--post-mlp-layernorm", _of("post_norms")),
    "untie_embeddings_and_output_weights": Expected(
        "--untie-embeddings-and-output-weights", lambda shape: not shape.tie_word_embeddings
    ),
    # alike in every supported family
    "normalization": Expected("--normalization", lambda shape: "RMSNorm"),
    "swiglu": Expected("--swiglu", lambda shape: True),
    "gated_linear_unit": Expected("--gated-linear-unit", lambda shape: True),
    "add_bias_linear": Expected("--add-bias-linear", lambda shape: False),
    "softmax_type": Expected("--softmax-type", lambda shape: "vanilla"),
    "layernorm_zero_centered_gamma": Expected("--apply-layernorm-1p", lambda shape: False),
    # rotary positions
    "rotary_base": Expected("--rotary-base", _of("rotary_base")),
    "rotary_percent": Expected("--rotary-percent", _of("rotary_percent")),
    "rotary_interleaved": Expected("--rotary-interleaved", _of("rotary_interleaved")),
    "use_rope_scaling": Expected("--use-rope-scaling", lambda shape: _llama3_factor(shape) is not None),
    "rope_scaling_factor": Expected("--rope-scaling-factor", _llama3_factor),
    "rotary_scaling_factor": Expected("--rotary-scaling-factor", lambda shape: _of_yarn("factor")(shape) or 1.0),
    "mscale": Expected("--mscale", _of_yarn("mscale")),
    "mscale_all_dim": Expected("--mscale-all-dim", _of_yarn("mscale_all_dim")),
    # latent attention
    "multi_latent_attention": Expected("--multi-latent-attention", lambda shape: shape.mla is not None),
    "q_lora_rank": Expected("--q-lora-rank", _of_latents("q_lora_rank")),
    "kv_lora_rank": Expected("--kv-lora-rank", _of_latents("kv_lora_rank")),
    "qk_head_dim": Expected("--qk-head-dim", _of_latents("qk_nope_head_dim")),
    "qk_pos_emb_head_dim": Expected("--qk-pos-emb-head-dim", _of_latents("qk_rope_head_dim")),
    "v_head_dim": Expected("--v-head-dim", _of_latents("v_head_dim")),
    # experts
    "num_moe_experts": Expected("--num-experts", _of_experts("num_experts")),
    "moe_ffn_hidden_size": Expected("--moe-ffn-hidden-size", _of_experts("ffn_hidden_size")),
    "moe_layer_freq": Expected("--moe-layer-freq", _expert_layers),
    "moe_shared_expert_intermediate_size": Expected(
        "--moe-shared-expert-intermediate-size", _of_experts("shared_ffn_hidden_size")
    ),
    "moe_router_topk": Expected("--moe-router-topk", _of_experts("top_k")),
    "moe_router_score_function": Expected("--moe-router-score-function", _of_experts("score_function")),
    "moe_router_pre_softmax": Expected("--moe-router-pre-softmax", _softmax_before_choice),
    "moe_router_enable_expert_bias": Expected(
        "--moe-router-enable-expert-bias", lambda shape: bool(shape.moe and shape.moe.expert_bias)
    ),
    "moe_router_num_groups": Expected("--moe-router-num-groups", _of_experts("num_groups")),
    "moe_router_group_topk": Expected("--moe-router-group-topk", _of_experts("top_k_groups")),
    "moe_router_topk_scaling_factor": Expected("--moe-router-topk-scaling-factor", _of_experts("scaling_factor")),
}
"""By the key in ``config.megatron``."""


def agrees(key: str, given: Any, expected: Any) -> bool:
    """Whether a flag says what config.json says."""
    if key == "moe_layer_freq" and isinstance(given, int) and expected is not None:
        # every so many layers, from the first one on
        return bool(given > 0 and expected == [int(layer % given == 0) for layer in range(len(expected))])
    if key == "moe_router_pre_softmax" and expected is None:
        return True
    if isinstance(given, float) and isinstance(expected, float):
        # equal as 32-bit numbers: converted models say 9.999999747e-06 for 1e-5
        return math.isclose(given, expected, rel_tol=1e-6)
    return bool(given == expected)
