"""What a checkpoint notes of a rank beside its tensors: the parallel layout, and random states."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

__all__ = ["layout", "model_keys", "random_states", "set_random_states"]


def layout() -> dict[str, int]:
    """Numbers of ranks, by what they share."""
    return {
        "world": dist.get_world_size(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
    }


def model_keys(chunks: Sequence[Any]) -> list[str]:
    """Names of the model chunks in a checkpoint: ``model``, or ``model0``, ``model1`` … of virtual pipeline stages."""
    return ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]


def random_states() -> dict[str, Any]:
    """All generators of this process, in types that ``torch.load`` reads with ``weights_only``."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["megatron"])
