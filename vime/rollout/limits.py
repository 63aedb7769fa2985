"""How many tokens prompt and response may have."""

from __future__ import annotations

from vime.config import Config
from vime.config.kinds import human_int
from vime.models import load_shape

__all__ = ["max_context_of"]


def max_context_of(config: Config, wanted: int | None) -> int:
    """The smallest of what the model, the engine (where there is one) and the user allow.

    Args:
        wanted: by the user; None: as much as there is.
    """
    given = None if config.algorithm.is_sft else config.vllm.get("max_model_len")
    engine = human_int(given) if given is not None else None
    limits = [load_shape(config.checkpoint.hf_checkpoint).max_position_embeddings, wanted, engine]
    return min(limit for limit in limits if limit is not None)
