"""Rotary positions by position id: cosine and sine are computed once a micro-batch, not in every layer.

Shape suffixes: t tokens, h heads, d width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vime.models import RopeScaling, YarnScaling

__all__ = ["Rope", "RopeTable", "rotate"]


class RopeTable(NamedTuple):
    """Cosine and sine of the tokens of a micro-batch, each [T, 1, D/2] in the dtype of the model."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Frequencies of one model (https://arxiv.org/abs/2104.09864), stretched as Llama 3 does where ``scaling`` says so.

    Heads are rotated as HuggingFace does it: dimension i goes with i + D/2.
    """

    head_dim: int
    base: float
    scaling: RopeScaling | YarnScaling | None = None

    def frequencies(self) -> Tensor:
        """Radians a position, float32 [D/2]."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        plain = 1.0 / self.base**exponents
        assert not isinstance(self.scaling, YarnScaling), "no family with YaRN is registered yet"
        return plain if self.scaling is None else _stretched(plain, self.scaling)

    def table(self, positions_t: Tensor, dtype: torch.dtype) -> RopeTable:
        """The table for these position ids, int64 [T]; angles are float32 whatever ``dtype``."""
        angles = positions_t.float()[:, None] * self.frequencies().to(positions_t.device)
        return RopeTable(angles.cos()[:, None].to(dtype), angles.sin()[:, None].to(dtype))


def _stretched(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow waves are divided by the factor, fast ones stay, those between are blended (Llama 3.1 model card)."""
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)  # of each wave in the original context
    keep = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return (1 - keep) * plain / scaling.factor + keep * plain


class _Rotate(torch.autograd.Function):
    """The rotation, whose backward is the rotation by the opposite angle. Saves nothing but the table."""

    @staticmethod
    def forward(ctx: Any, x_thd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x_thd, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradients[0], cos, -sin), None, None


def _rotated(x_thd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_thd.chunk(2, dim=-1)
    out = torch.empty_like(x_thd, memory_format=torch.contiguous_format)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first)
    torch.mul(second, cos, out=out_second)
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)
    return out


def rotate(x_thd: Tensor, table: RopeTable) -> Tensor:
    """Queries or keys [T, H, D] turned by their positions."""
    rotated: Tensor = _Rotate.apply(x_thd, table.cos, table.sin)  # type: ignore[no-untyped-call]
    return rotated
