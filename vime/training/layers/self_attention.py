"""Attention of a layer, with everything between its two projections in few passes over memory where kernels do that."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from vime.platform import current
from vime.training.layers.attention import attend
from vime.training.layers.lean import lean
from vime.training.layers.segments import Segments

__all__ = ["FusedSelfAttention", "self_attention"]


def self_attention() -> type[SelfAttention]:
    """The class to build."""
    return FusedSelfAttention if current().fused_kernels else SelfAttention


class FusedSelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's self-attention for packed sequences; norms of heads and rotation are one kernel."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H] → [T, 1, H]."""
        segments = options.get("packed_seq_params")
        if not isinstance(segments, Segments) or not self._fits(segments):
            answer: tuple[Tensor, Tensor | None] = super().forward(hidden_states, attention_mask, **options)
            return answer
        from vime.training.kernels.qkv import split_norm_rotate

        assert segments.rope is not None, "see _fits"
        with lean(hidden_states):
            mixed, _ = self.linear_qkv(hidden_states)
        query, key, value = split_norm_rotate(
            mixed.squeeze(1),
            _weight(self.q_layernorm),
            _weight(self.k_layernorm),
            segments.rope.cos,
            segments.rope.sin,
            groups=self.num_query_groups_per_partition,
            epsilon=self.config.layernorm_epsilon,
        )

        def core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(query, key, value, segments, scale=self.core_attention.scale, layer=self.layer_number)

        if self.checkpoint_core_attention and self.training:
            attended = tensor_parallel.checkpoint(core, False, query, key, value)
        else:
            attended = core(query, key, value)
        output, bias = self.linear_proj(attended.flatten(1)[:, None])
        return output, bias

    def _fits(self, segments: Segments) -> bool:
        """Whether this rank has whole query groups, and whole heads are rotated, one half with the other."""
        rope = segments.rope
        if rope is None or rope.interleaved or self.config.num_query_groups < self.world_size:
            return False
        return bool(2 * rope.cos.shape[-1] == self.hidden_size_per_attention_head)


def _weight(norm: torch.nn.Module | None) -> Tensor | None:
    """The weight of a norm whose work the kernel does; None where the model has no norm there.

    Megatron waits in a hook of the norm for a weight that is still being gathered from other ranks.
    """
    if norm is None or isinstance(norm, IdentityOp):
        return None
    for hook in norm._forward_pre_hooks.values():
        hook(norm, ())
    weight: Tensor = norm.weight  # type: ignore[assignment]
    return weight
