"""Functions that runs on GPUs are given."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from vime.types import Sample

TOKENS = "tokens.jsonl"


def keep_tokens(args: Any, sample: Sample, *, rollout_id: int | None = None, **_: Any) -> None:
    """Writes what the engine said of its tokens beside the run's other records."""
    row = {
        "rollout_id": rollout_id,
        "tokens": sample.tokens,
        "response_length": sample.response_length,
        "log_probs": sample.rollout_log_probs,
    }
    with Path(args.save, TOKENS).open("a") as file:  # one short line at a time, from one process
        file.write(json.dumps(row) + "\n")


async def keep_tokens_and_rest(args: Any, sample: Sample, **given: Any) -> None:
    """The same, and rollouts take so long that something can happen in them."""
    keep_tokens(args, sample, **given)
    await asyncio.sleep(1.5)
