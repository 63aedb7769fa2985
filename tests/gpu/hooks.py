"""Functions that runs on GPUs are given."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from vime.types import Sample

TOKENS = "tokens.jsonl"
USED = "used.txt"


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


def keep_used_memory(args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Writes the bytes that all processes use of the trainer's GPU as it is about to learn; 0 where it has none."""
    import torch

    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    with Path(args.save, USED).open("a") as file:
        file.write(f"{total - free}\n")


async def keep_tokens_and_rest(args: Any, sample: Sample, **given: Any) -> None:
    """The same, and rollouts take so long that something can happen in them."""
    keep_tokens(args, sample, **given)
    await asyncio.sleep(1.5)
