"""Megatron's settings that vime gives one value: a flag may repeat it, and another value is refused at start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vime.config.config import Config
from vime.config.layouts import Layout
from vime.config.rules.base import Violation, option
from vime.config.rules.model import shape_or_none

__all__ = ["GRADIENTS", "INTERLEAVED", "MODEL"]

MODEL: Mapping[str, Any] = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "moe_token_dispatcher_type": "alltoall",  # asked for by variable_seq_lengths, dense models too
    "moe_router_dtype": "fp32",
    "attention_softmax_in_fp32": True,
}

GRADIENTS: Mapping[str, Any] = {"grad_reduce_in_fp32": True}

INTERLEAVED: Mapping[str, Any] = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
"""Interleaved stages computed with wrong activations, without a word, when their messages were sent in batches."""


def fixed_settings(config: Config) -> Iterator[Violation]:
    needed = {**MODEL, **GRADIENTS}
    if Layout.of(config, shape_or_none(config)).virtual > 1:
        needed |= INTERLEAVED
    for name, value in needed.items():
        given = config.megatron.get(name, value)
        if given != value:
            yield Violation(f"{option(name)} {given} cannot be given: vime needs {value} there", (name,))


RULES = (fixed_settings,)
