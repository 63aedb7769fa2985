"""Rotary positions by position id: cosine and sine are computed once a micro-batch, not in every layer.

Shape suffixes: t tokens, h heads, d width of a head, r channels of a head that are rotated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vime.models import RopeScaling, YarnScaling
from vime.platform import current

__all__ = ["Rope", "RopeTable", "rotate"]


class RopeTable(NamedTuple):
    """Cosine and sine of the tokens of a micro-batch, each [T, 1, R/2] in the dtype of the model."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False  # channel 2i is rotated with 2i + 1, not i with i + R/2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Frequencies of one model (https://arxiv.org/abs/2104.09864), stretched as ``scaling`` says."""

    width: int  # channels of a head that are rotated, R: the first ones
    base: float
    scaling: RopeScaling | YarnScaling | None = None
    interleaved: bool = False

    def frequencies(self) -> Tensor:
        """Radians a position, float32 [R/2]."""
        exponents = torch.arange(0, self.width, 2, dtype=torch.float32) / self.width
        plain = 1.0 / self.base**exponents
        match self.scaling:
            case None:
                return plain
            case RopeScaling():
                return _stretched(plain, self.scaling)
            case YarnScaling():
                keep = _kept_by_yarn(self.scaling, self.base, self.width)
                return plain / self.scaling.factor * (1 - keep) + plain * keep

    def table(self, positions_t: Tensor, dtype: torch.dtype) -> RopeTable:
        """The table for these position ids, int64 [T]; angles are float32 whatever ``dtype``."""
        angles = positions_t.float()[:, None] * self.frequencies().to(positions_t.device)
        size = self.scaling.attention_factor if isinstance(self.scaling, YarnScaling) else 1.0
        cos, sin = ((wave * size)[:, None].to(dtype) for wave in (angles.cos(), angles.sin()))
        return RopeTable(cos, sin, self.interleaved)


def _stretched(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow waves are divided by the factor, fast ones stay, those between are blended (Llama 3.1 model card)."""
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)  # of each wave in the original context
    keep = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return (1 - keep) * plain / scaling.factor + keep * plain


def _kept_by_yarn(scaling: YarnScaling, base: float, width: int) -> Tensor:
    """How much of each frequency stays, [R/2]: 1 for fast waves, 0 for slow ones, a ramp over the channels between.

    The ramp goes from the channel whose wave turns ``beta_fast`` times in the original context to that which turns
    ``beta_slow`` times (https://arxiv.org/abs/2309.00071, section 3.2).
    """

    def channel(turns: float) -> float:
        wave = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return width * math.log(wave) / (2 * math.log(base))

    first, last = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - first) / max(last - first, 0.001)
    return 1 - ramp.clamp(0, 1)


class _Rotate(torch.autograd.Function):
    """The rotation, whose backward is the rotation by the opposite angle. Saves nothing but the table."""

    @staticmethod
    def forward(ctx: Any, x_thd: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotated(x_thd, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradients[0], cos, -sin, ctx.interleaved), None, None, None


def _rotated(x_thd: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    if current().fused_kernels:
        from vime.training.kernels.rotary import rotated

        return rotated(x_thd, cos, sin, interleaved=interleaved)
    width = 2 * cos.shape[-1]
    out = torch.empty_like(x_thd, memory_format=torch.contiguous_format)
    first, second = _partners(x_thd[..., :width], interleaved)
    out_first, out_second = _partners(out[..., :width], interleaved)
    torch.mul(first, cos, out=out_first)
    torch.mul(second, cos, out=out_second)
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)
    out[..., width:] = x_thd[..., width:]
    return out


def _partners(x_thr: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """The channels that are rotated with each other, as two views [T, H, R/2]."""
    return (x_thr[..., 0::2], x_thr[..., 1::2]) if interleaved else x_thr.chunk(2, dim=-1)


def rotate(x_thd: Tensor, table: RopeTable) -> Tensor:
    """Queries or keys [T, H, D] turned by their positions: the first R channels of each head, the others stay."""
    rotated: Tensor = _Rotate.apply(x_thd, *table)  # type: ignore[no-untyped-call]
    return rotated
