"""Llama 2 and 3.x, SmolLM2 and whatever else calls itself LlamaForCausalLM."""

from __future__ import annotations

from vime.models.decoder import decoder_rules, read_decoder
from vime.models.family import Family
from vime.models.hf_config import HfConfig
from vime.models.shape import ModelShape


def read(config: HfConfig) -> ModelShape:
    config.refuse_unless("attention_bias", [False], default=False)
    config.refuse_unless("mlp_bias", [False], default=False)
    return read_decoder(config)


FAMILY = Family(architecture="LlamaForCausalLM", read=read, rules=decoder_rules)
