"""The gated MLP of a dense layer."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.mlp import MLP
from torch import Tensor

from vime.platform import current
from vime.training.layers.lean import cheap, lean

__all__ = ["GatedMlp"]


class GatedMlp(MLP):  # type: ignore[misc]
    """Megatron's MLP, with SwiGLU as one kernel where there is one."""

    def forward(self, hidden_states: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H] → [T, 1, H]."""
        if not current().fused_kernels or options.get("per_token_scale") is not None:
            answer: tuple[Tensor, Tensor | None] = super().forward(hidden_states, **options)
            return answer
        from vime.training.kernels.swiglu import swiglu

        with lean(hidden_states):
            wide, _ = self.linear_fc1(hidden_states)
        narrow, kept = swiglu(wide), wide.detach()
        if self.config.recompute_granularity != "full":
            cheap(narrow, lambda: swiglu(kept))
        with lean(narrow):
            output, bias = self.linear_fc2(narrow)
        return output, bias
