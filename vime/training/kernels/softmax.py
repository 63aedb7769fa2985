"""What a policy loss wants of softmax, from logits that are read once.

Shapes: R rows, C columns (tokens of the vocabulary).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["RowStatistics", "logits_to_gradient", "row_statistics"]

BLOCK = 4096


class RowStatistics(NamedTuple):
    """Of each row's scores ``s = logits * scale``, float32 [R]."""

    peak: Tensor  # max s
    denominator: Tensor  # sum exp(s - peak)
    weighted: Tensor  # sum exp(s - peak) (s - peak)
    chosen: Tensor  # s of the target; 0 where there is none


@triton.jit
def _statistics(logits, targets, out, stride, rows, columns, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    peak = -float("inf")
    denominator = 0.0
    weighted = 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        score = tl.load(logits + row * stride + column, mask=inside, other=-float("inf")).to(tl.float32) * scale
        higher = tl.maximum(peak, tl.max(score, 0))
        shrink = tl.exp(peak - higher)  # what was summed so far was relative to the old peak
        shift = tl.where(shrink > 0.0, peak - higher, 0.0)
        weighted = shrink * (weighted + shift * denominator)
        denominator = shrink * denominator
        relative = tl.where(inside, score - higher, 0.0)
        weight = tl.where(inside, tl.exp(relative), 0.0)
        denominator += tl.sum(weight, 0)
        weighted += tl.sum(weight * relative, 0)
        peak = higher
    target = tl.load(targets + row)
    chosen = tl.load(logits + row * stride + tl.maximum(target, 0)).to(tl.float32) * scale
    tl.store(out + row, peak)
    tl.store(out + rows + row, denominator)
    tl.store(out + 2 * rows + row, weighted)
    tl.store(out + 3 * rows + row, tl.where(target >= 0, chosen, 0.0))


@triton.jit
def _gradient(
    logits,
    out,
    targets,
    log_sums,
    entropy,
    d_chosen,
    d_entropy,
    stride,
    out_stride,
    columns,
    scale,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    logit = tl.load(logits + row * stride + column, mask=inside, other=0.0)
    log_prob = logit.to(tl.float32) * scale - tl.load(log_sums + row)
    chosen = tl.load(d_chosen + row) * scale
    factor = -chosen - tl.load(d_entropy + row) * scale * (log_prob + tl.load(entropy + row))
    gradient = tl.exp(log_prob) * factor + tl.where(column == tl.load(targets + row), chosen, 0.0)
    tl.store(out + row * out_stride + column, gradient, mask=inside)


def row_statistics(logits: Tensor, targets: Tensor, scale: float) -> RowStatistics:
    """Args: logits [R, C] of any float dtype, rows contiguous; targets int64 [R], columns, or -1 for none."""
    rows, columns = logits.shape
    out = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    if rows:
        _statistics[(rows,)](logits, targets, out, logits.stride(0), rows, columns, scale, BLOCK)
    return RowStatistics(*out)


def logits_to_gradient(
    logits: Tensor,
    targets: Tensor,
    log_sums: Tensor,
    entropy: Tensor,
    d_chosen: Tensor,
    d_entropy: Tensor,
    scale: float,
    out: Tensor,
) -> Tensor:
    """From logits [R, C] to the gradient of a loss, given those of the targets' log-probs and of the entropies.

    With p = exp(logits * scale - log_sums): ``scale (d_chosen (1[target] - p) - d_entropy p (log p + entropy))``.

    Args:
        out: where it is written, [R, C] of any float dtype, rows contiguous; the logits themselves may be overwritten.
    """
    rows, columns = logits.shape
    if rows:
        grid = (rows, triton.cdiv(columns, BLOCK))
        strides = logits.stride(0), out.stride(0)
        _gradient[grid](logits, out, targets, log_sums, entropy, d_chosen, d_entropy, *strides, columns, scale, BLOCK)
    return out
