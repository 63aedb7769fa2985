"""Qwen3 with experts: Qwen3's attention; softmax routing, no shared expert; single layers may be dense."""

from __future__ import annotations

import dataclasses

from vime.models.decoder import decoder_rules, read_decoder
from vime.models.family import Family
from vime.models.hf_config import HfConfig
from vime.models.shape import ModelShape, MoeShape


def read(config: HfConfig) -> ModelShape:
    config.refuse_unless("attention_bias", [False], default=False)
    config.refuse_unless("use_sliding_window", [False], default=False)
    shape = read_decoder(config, qk_layernorm=True)
    return dataclasses.replace(shape, moe=_experts(config, shape.num_layers))


def _experts(config: HfConfig, num_layers: int) -> MoeShape:
    step, dense = config.integer("decoder_sparse_step", 1), config.values.get("mlp_only_layers") or ()
    return MoeShape(
        num_experts=config.integer("num_experts", config.values.get("num_local_experts")),
        top_k=config.integer("num_experts_per_tok"),
        ffn_hidden_size=config.integer("moe_intermediate_size"),
        dense_layers=frozenset(layer for layer in range(num_layers) if layer in dense or (layer + 1) % step),
        normalize_weights=config.flag("norm_topk_prob"),
    )


FAMILY = Family(architecture="Qwen3MoeForCausalLM", read=read, rules=decoder_rules)
