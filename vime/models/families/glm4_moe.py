"""GLM-4.5, 4.6 and 4.7: experts as in DeepSeek-V3 behind grouped-query attention that rotates half of each head."""

from __future__ import annotations

import dataclasses

from vime.models.decoder import decoder_rules, read_decoder
from vime.models.family import Family
from vime.models.hf_config import HfConfig
from vime.models.moe import read_sigmoid_moe
from vime.models.shape import ModelShape


def read(config: HfConfig) -> ModelShape:
    shape = read_decoder(
        config,
        rotary_percent=0.5,
        qk_layernorm=config.flag("use_qk_norm"),
        add_qkv_bias=config.flag("attention_bias"),
    )
    return dataclasses.replace(
        shape,
        moe=read_sigmoid_moe(config, shape.num_layers),
        num_mtp_layers=config.count("num_nextn_predict_layers"),
    )


FAMILY = Family(architecture="Glm4MoeForCausalLM", read=read, rules=decoder_rules)
