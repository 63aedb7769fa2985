"""DeepSeek-V3.2: DeepSeek-V3 in which an indexer chooses the tokens that each token attends to.

Up to ``index_topk`` tokens it chooses all, and attention is that of DeepSeek-V3. Longer contexts are refused at the
start, as their training would need the sparse attention. The indexer itself is carried along untrained.
"""

from __future__ import annotations

import dataclasses

from vime.models.decoder import decoder_rules
from vime.models.families import deepseek_v3
from vime.models.family import Family
from vime.models.hf_config import HfConfig
from vime.models.shape import ModelShape

INDEXER = r"\.self_attn\.indexer\."


def read(config: HfConfig) -> ModelShape:
    config.refuse_unless("mlp_layer_types", [None, _dense_first(config)], default=None)
    return dataclasses.replace(deepseek_v3.read(config), longest_exact_context=config.integer("index_topk"))


def _dense_first(config: HfConfig) -> list[str]:
    layers, dense = config.integer("num_hidden_layers"), config.count("first_k_dense_replace")
    return ["dense"] * min(dense, layers) + ["sparse"] * (layers - dense)


FAMILY = Family(architecture="DeepseekV32ForCausalLM", read=read, rules=decoder_rules, carries=INDEXER)
