"""GLM-4 of 2024 (glm-4-9b-hf): half of each head is rotated, neighbours together; gate and up are one tensor."""

from __future__ import annotations

from collections.abc import Iterator

from vime.models.decoder import decoder_rules, read_decoder
from vime.models.family import Family
from vime.models.hf_config import HfConfig
from vime.models.rules import WeightRule
from vime.models.shape import ModelShape


def read(config: HfConfig, *, post_norms: bool = False) -> ModelShape:
    return read_decoder(
        config,
        head_dim=128,
        norm_epsilon=1.5625e-07,
        rotary_percent=0.5,
        rotary_interleaved=True,
        add_qkv_bias=config.flag("attention_bias", True),
        post_norms=post_norms,
    )


def rules(shape: ModelShape) -> Iterator[WeightRule]:
    return decoder_rules(shape, fused_gate_up=True)


FAMILY = Family(architecture="GlmForCausalLM", read=read, rules=rules)
