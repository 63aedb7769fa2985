"""How many tokens prompt and response may have."""

from __future__ import annotations

from vime.config import Config
from vime.config.kinds import human_int
from vime.data.prompt_set import Limit
from vime.models import load_shape

__all__ = ["context_limit", "max_context_of", "prompt_limit"]


def context_limit(config: Config, wanted: int | None, name: str = "--rollout-max-context-len") -> Limit:
    """The smallest of what the user, the engine (where there is one) and the model allow.

    Args:
        wanted: by the user; None: as much as there is.
        name: of what says so.
    """
    given = None if config.algorithm.is_sft else config.vllm.get("max_model_len")
    engine = human_int(given) if given is not None else None
    model = load_shape(config.checkpoint.hf_checkpoint).max_position_embeddings
    limits = {name: wanted, "--vllm-max-model-len": engine, "max_position_embeddings of the model": model}
    found = [Limit(tokens, f"{reason} {tokens}") for reason, tokens in limits.items() if tokens is not None]
    return min(found, key=lambda limit: limit.tokens)


def max_context_of(config: Config, wanted: int | None) -> int:
    """The tokens of ``context_limit``."""
    return context_limit(config, wanted).tokens


def prompt_limit(context: Limit, wanted: int | None, name: str = "--rollout-max-prompt-len") -> Limit:
    """What the user wants of prompts, where that leaves a token to answer. Longer ones are dropped at the start, with a
    count, instead of failing later."""
    room = context.tokens - 1
    if wanted is not None and wanted <= room:
        return Limit(wanted, name)
    return Limit(room, f"{context.reason}, with one token to answer")
