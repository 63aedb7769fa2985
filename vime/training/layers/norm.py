"""The norm of the local layer spec."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

__all__ = ["Norm"]


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm, as the configuration says; building one returns torch's own module.

    Megatron's wrapper of torch's norms (``WrappedTorchNorm``) refuses sequence parallelism. Under it each rank sees a
    part of the tokens, so the gradients of the norm must be summed over the tensor-parallel group. Megatron does that
    for the parameters that carry ``sequence_parallel``.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.Module:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
