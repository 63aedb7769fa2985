"""Megatron-LM's flags whose names are not those of Megatron-core's fields: the wheel of Megatron-core has no parser.

The list holds what public training scripts use for decoder-only models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vime.config.kinds import FLOAT, INT, LAYER_PATTERN, SWITCH, Kind, choice


@dataclass(frozen=True, slots=True)
class Alias:
    """What a flag of Megatron-LM sets in ``config.megatron``."""

    key: str
    kind: Kind
    present: Any = True  # for a switch: the value that its presence means


ALIASES: Mapping[str, Alias] = {
    # shape of the model: compared with config.json
    "swiglu": Alias("swiglu", SWITCH),
    "disable-bias-linear": Alias("add_bias_linear", SWITCH, present=False),
    "norm-epsilon": Alias("layernorm_epsilon", FLOAT),
    "group-query-attention": Alias("group_query_attention", SWITCH),
    "use-rotary-position-embeddings": Alias("position_embedding_type", SWITCH, present="rope"),
    "position-embedding-type": Alias("position_embedding_type", choice(("rope",))),
    "rotary-base": Alias("rotary_base", FLOAT),
    "rotary-percent": Alias("rotary_percent", FLOAT),
    "use-rope-scaling": Alias("use_rope_scaling", SWITCH),
    "rope-scaling-factor": Alias("rope_scaling_factor", FLOAT),
    "untie-embeddings-and-output-weights": Alias("untie_embeddings_and_output_weights", SWITCH),
    "post-self-attn-layernorm": Alias("post_self_attn_layernorm", SWITCH),
    "post-mlp-layernorm": Alias("post_mlp_layernorm", SWITCH),
    "num-experts": Alias("num_moe_experts", INT),
    "moe-layer-freq": Alias("moe_layer_freq", LAYER_PATTERN),
    "q-lora-rank": Alias("q_lora_rank", INT),
    "kv-lora-rank": Alias("kv_lora_rank", INT),
    "qk-head-dim": Alias("qk_head_dim", INT),
    "qk-pos-emb-head-dim": Alias("qk_pos_emb_head_dim", INT),
    "v-head-dim": Alias("v_head_dim", INT),
    "rotary-scaling-factor": Alias("rotary_scaling_factor", FLOAT),
    "mscale": Alias("mscale", FLOAT),
    "mscale-all-dim": Alias("mscale_all_dim", FLOAT),
    "apply-layernorm-1p": Alias("layernorm_zero_centered_gamma", SWITCH),
    # uneven pipelines
    "decoder-first-pipeline-num-layers": Alias("num_layers_in_first_pipeline_stage", INT),
    "decoder-last-pipeline-num-layers": Alias("num_layers_in_last_pipeline_stage", INT),
    # kernels and precision
    "no-rope-fusion": Alias("apply_rope_fusion", SWITCH, present=False),
    "no-bias-swiglu-fusion": Alias("bias_activation_fusion", SWITCH, present=False),
    "no-bias-gelu-fusion": Alias("bias_activation_fusion", SWITCH, present=False),
    "accumulate-allreduce-grads-in-fp32": Alias("grad_reduce_in_fp32", SWITCH),
    "no-check-for-nan-in-loss-and-grad": Alias("check_for_nan_in_grad", SWITCH, present=False),
    "ddp-bucket-size": Alias("bucket_size", INT),
    # accepted because scripts have them; packed samples do not need them, and a warning says so
    "seq-length": Alias("seq_length", INT),
    "max-position-embeddings": Alias("max_position_embeddings", INT),
}

_PACKED = "samples are packed, and the model's own context counts"
_OWN_EXPERTS = "vime multiplies by its experts in its own way"

WITHOUT_EFFECT: Mapping[str, str] = {
    "seq_length": _PACKED,
    "max_position_embeddings": _PACKED,
    "cp_comm_type": "context-parallel ranks gather keys and values",
    "moe_use_legacy_grouped_gemm": _OWN_EXPERTS,
}
"""By the key in ``config.megatron``: why a flag changes nothing. Megatron is not told of it."""
