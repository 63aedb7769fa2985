"""DeepSeek-V3 and R1, Kimi-K2, Moonlight: latent attention, experts chosen by sigmoids, the first layers dense."""

from __future__ import annotations

import dataclasses

from vime.models.decoder import decoder_rules, read_decoder
from vime.models.family import Family
from vime.models.hf_config import HfConfig
from vime.models.mla import read_mla
from vime.models.moe import read_sigmoid_moe
from vime.models.shape import ModelShape


def read(config: HfConfig) -> ModelShape:
    config.refuse_unless("attention_bias", [False], default=False)
    mla = read_mla(config)
    shape = read_decoder(config, rotary_interleaved=config.flag("rope_interleave", True))
    return dataclasses.replace(
        shape,
        num_query_groups=shape.num_attention_heads,  # keys and values are made of one latent for each head
        kv_channels=mla.qk_head_dim,
        qk_layernorm=True,  # so Megatron calls the norms of the latents
        mla=mla,
        moe=read_sigmoid_moe(config, shape.num_layers),
        num_mtp_layers=config.count("num_nextn_predict_layers"),
    )


FAMILY = Family(architecture="DeepseekV3ForCausalLM", read=read, rules=decoder_rules)
