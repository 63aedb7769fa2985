"""Rewards that a random model can already earn, so that tiny runs have something to learn."""

from __future__ import annotations

from typing import Any

from vime.types import Sample


async def short_words(args: Any, sample: Sample) -> float:
    """Prefers answers with many different characters."""
    return len(set(sample.response)) / max(len(sample.response), 1)


async def broken(args: Any, sample: Sample) -> float:
    """Fails on every sample."""
    raise RuntimeError("the reward service is down")
