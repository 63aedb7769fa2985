"""GLM-5: DeepSeek-V3.2 in other sizes; layers may share an indexer's choice, which changes nothing where it is all."""

from __future__ import annotations

from vime.models.decoder import decoder_rules
from vime.models.families import deepseek_v32
from vime.models.family import Family

FAMILY = Family(
    architecture="GlmMoeDsaForCausalLM", read=deepseek_v32.read, rules=decoder_rules, carries=deepseek_v32.INDEXER
)
