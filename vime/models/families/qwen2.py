"""Qwen2 and Qwen2.5: a bias on queries, keys and values, and on nothing else."""

from __future__ import annotations

from vime.models.decoder import decoder_rules, read_decoder
from vime.models.family import Family
from vime.models.hf_config import HfConfig
from vime.models.shape import ModelShape


def read(config: HfConfig) -> ModelShape:
    config.refuse_unless("use_sliding_window", [False], default=False)
    return read_decoder(config, add_qkv_bias=True)


FAMILY = Family(architecture="Qwen2ForCausalLM", read=read, rules=decoder_rules)
