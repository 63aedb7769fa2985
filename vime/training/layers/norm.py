"""The norm of the local layer spec."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from vime.platform import current
from vime.training.layers.lean import cheap

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
        kind = _rms_norm_module() if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        if isinstance(norm, FusedRMSNorm):
            norm.cheap = config.recompute_granularity != "full"  # there the whole layer is computed again anyway
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def _rms_norm_module() -> type[torch.nn.RMSNorm]:
    return FusedRMSNorm if current().fused_kernels else torch.nn.RMSNorm


class FusedRMSNorm(torch.nn.RMSNorm):
    """One kernel forward and one backward; torch's own takes several passes over memory in bf16."""

    cheap: bool = True  # whether the output need not be kept

    def forward(self, x: Tensor) -> Tensor:
        from vime.training.kernels.rms_norm import rms_norm

        assert self.eps is not None, "the configuration always gives one"
        weight, epsilon, kept = self.weight, self.eps, x.detach()
        y = rms_norm(x, weight, epsilon)
        return cheap(y, lambda: rms_norm(kept, weight, epsilon)) if self.cheap else y
