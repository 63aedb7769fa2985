"""Qwen3, dense: RMSNorm on each query and key head, heads of 128 channels whatever the hidden size, no biases."""

from __future__ import annotations

from vime.models.decoder import decoder_rules, read_decoder
from vime.models.family import Family
from vime.models.hf_config import HfConfig
from vime.models.shape import ModelShape


def read(config: HfConfig) -> ModelShape:
    config.refuse_unless("attention_bias", [False], default=False)
    config.refuse_unless("use_sliding_window", [False], default=False)
    return read_decoder(config, head_dim=128, qk_layernorm=True)


FAMILY = Family(architecture="Qwen3ForCausalLM", read=read, rules=decoder_rules)
