"""The patch that keeps the objects in a torch_dist checkpoint from running code when Megatron reads them.

Site in megatron-core 0.16.1: ``dist_checkpointing/strategies/torch.py:484``. The planner has ``load_bytes`` of torch's
DefaultLoadPlanner, which unpickles with ``weights_only=False``.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.planner import ReadItem

from vime.platform.megatron_on_cpu import Site

__all__ = ["SITES", "load_plain_objects"]

SITES = (Site("dist_checkpointing/strategies/torch.py", 484, "class MCoreLoadPlanner(DefaultLoadPlanner):"),)


def load_plain_objects() -> None:
    """From now on Megatron's planner loads only tensors, plain values and torch's ``safe_globals``."""
    from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner

    MCoreLoadPlanner.load_bytes = _load_bytes


def _load_bytes(planner: Any, read_item: ReadItem, value: io.BytesIO) -> None:
    name, loaded = read_item.dest_index.fqn, torch.load(value, weights_only=True)
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[name], loaded)
    else:
        planner.state_dict[name] = loaded
