"""What this version can be told but cannot do yet. To lift a limit, delete its line here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vime.config.config import Config
from vime.config.rules.base import Violation, option

ONLY: Mapping[str, Any] = {
    "attention_backend": "auto",
    "log_probs_max_tokens_per_gpu": None,
    "train_memory_margin_bytes": 1 << 30,
    "update_weight_mode": "full",
    "debug_rollout_only": False,
}
"""The one value that each of these flags may have; None: it may not be given."""


def limit(name: str) -> str | None:
    """A sentence for the help of a flag: what this version takes of it; None where it takes everything."""
    if name not in ONLY:
        return None
    only = ONLY[name]
    return "This version refuses it." if only is None or only is False else f"This version takes {only} only."


def not_yet(config: Config) -> Iterator[Violation]:
    values = config.flat()
    for name, only in ONLY.items():
        derived = config.origins.get(name, "").startswith("derived")
        if values.get(name, only) != only and not derived:
            said = option(name) if values[name] is True else f"{option(name)} {values[name]}"
            rest = "" if only is None or only is False else f" (only {only} is)"
            yield Violation(f"{said} is not yet supported by this version{rest}", (name,))


RULES = (not_yet,)
