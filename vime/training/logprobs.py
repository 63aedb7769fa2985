"""Log-probability and entropy of chosen tokens, from hidden states, without keeping fp32 logits.

The one definition (actor, reference and engine alike): log-softmax over the whole vocabulary, in float32, of the
logits divided by the rollout temperature. The output layer runs only where a token is wanted, and what softmax needs
in float32 exists for a few tokens at a time.

Shape suffixes: t wanted tokens, h hidden size, v rows of the vocabulary on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vime.platform import current

__all__ = ["TokenLogProbs", "Vocabulary", "token_log_probs"]

LOGIT_ELEMENTS = 1 << 28
"""Logits are kept for the backward pass up to this many elements (1 GiB in float32). Beyond it they are computed block
by block, and once more in the backward pass."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The rows of the output layer that this tensor-parallel rank has."""

    start: int  # id of its first row
    size: int  # rows that stand for tokens; those behind are padding and belong to no softmax
    group: dist.ProcessGroup | None = None  # the ranks that hold the other rows; None when there are none

    @classmethod
    def shard(cls, total: int, rows: int, rank: int, group: dist.ProcessGroup | None) -> Vocabulary:
        """The ``rank``-th of equal shards of ``rows`` rows of a vocabulary of ``total`` tokens."""
        size = min(rows, total - rank * rows)
        assert size > 0, f"tensor-parallel rank {rank} holds no token: {total} tokens, {rows} rows a rank"
        return cls(rank * rows, size, group)

    def sum(self, values: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def max(self, values: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values


class TokenLogProbs(NamedTuple):
    """Both float32 [T] with gradient, in nats."""

    log_probs_t: Tensor  # of the target tokens
    entropy_t: Tensor  # of the distributions that they were taken from


def token_log_probs(
    hidden_th: Tensor,
    weight_vh: Tensor,
    targets_t: Tensor,
    vocabulary: Vocabulary,
    *,
    temperature: float = 1.0,
    adds: bool = False,
) -> TokenLogProbs:
    """What the model says about ``targets_t`` (int64, ids in the whole vocabulary) from these hidden states.

    Args:
        adds: the gradient of the weight is added to its float32 ``main_grad``, as ``vime.platform.megatron_wgrad`` does
            for other layers.

    Under tensor parallelism the gradient of ``hidden_th`` is this rank's part; the caller's communication adds them up.
    """
    inverse = 1.0 / temperature
    answer = _Head.apply(hidden_th, weight_vh, targets_t, vocabulary, inverse, adds)  # type: ignore[no-untyped-call]
    return TokenLogProbs(*answer)


class _Head(torch.autograd.Function):
    """Output layer, softmax and choice in one, so that nothing of size T·V lives in float32."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary, scale: float, adds: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        log_probs, entropy, log_sums = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        blocks = _blocks(len(hidden), vocabulary.size, LOGIT_ELEMENTS)
        softmax = _softmax(len(hidden), vocabulary, scale, hidden.device)
        logits = None
        for block in blocks:
            del logits  # before there are others
            logits = _logits(hidden[block], weight[: vocabulary.size])
            log_probs[block], entropy[block], log_sums[block] = softmax.statistics(logits, targets[block])
        ctx.save_for_backward(hidden, weight, targets, entropy, log_sums)
        ctx.vocabulary, ctx.scale, ctx.blocks = vocabulary, scale, blocks
        ctx.parameter = weight if adds else None
        ctx.kept_logits = logits if len(blocks) == 1 and any(ctx.needs_input_grad) else None
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, d_log_probs: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropy, log_sums = ctx.saved_tensors
        rows = weight[: ctx.vocabulary.size]
        softmax = _softmax(len(hidden), ctx.vocabulary, ctx.scale, hidden.device)
        d_hidden = torch.empty_like(hidden)
        parameter: Any = ctx.parameter if ctx.needs_input_grad[1] else None
        d_rows = None if parameter is None else parameter.main_grad[: len(rows)]
        for block in ctx.blocks:
            logits, ctx.kept_logits = ctx.kept_logits, None  # it is overwritten; a second backward computes it again
            logits = _logits(hidden[block], rows) if logits is None else logits
            gradients = (None if g is None else g[block] for g in (d_log_probs, d_entropy))
            known = targets[block], log_sums[block], entropy[block]
            d_logits = softmax.to_gradient(logits, hidden.dtype, *known, *gradients)
            torch.mm(d_logits, rows, out=d_hidden[block])
            if ctx.needs_input_grad[1]:
                d_rows = _add_product(d_rows, d_logits, hidden[block])
            del logits, d_logits  # before there are others
        return d_hidden, _weight_gradient(weight, d_rows, parameter) if ctx.needs_input_grad[1] else None, *[None] * 4


def _weight_gradient(weight: Tensor, d_rows: Tensor | None, parameter: Any) -> Tensor:
    """What autograd gets. Where all was added already it is zeros without memory, for hooks to be called, and because
    the gradient of an embedding that is the same weight is added to it."""
    if parameter is not None:
        parameter.grad_added_to_main_grad = True
        return weight.new_zeros(()).expand_as(weight)
    if d_rows is None:  # a context-parallel rank may have no response token to predict
        return torch.zeros_like(weight)
    d_weight = d_rows.to(weight.dtype)
    if len(d_rows) < len(weight):
        d_weight = F.pad(d_weight, (0, 0, 0, len(weight) - len(d_rows)))
    return d_weight


def _logits(hidden: Tensor, rows: Tensor) -> Tensor:
    """[t, V]. On a GPU in float32, in which the product is summed up anyway: to round logits to half precision costs a
    log-prob as much as all other rounding of the model together."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, rows.t(), out_dtype=torch.float32)
    return hidden @ rows.t()


def _blocks(tokens: int, width: int, elements: int) -> list[slice]:
    """Cuts the tokens so that no block of ``width`` columns has more elements than that."""
    step = max(elements // width, 1)
    return [slice(at, min(at + step, tokens)) for at in range(0, tokens, step)]


def _softmax(tokens: int, vocabulary: Vocabulary, scale: float, device: torch.device) -> _FusedSoftmax | _SlicedSoftmax:
    """What computes with the logits of one block [T, V], by two methods that may overwrite them.

    ``statistics`` gives the log-probability of the targets, the entropy, and the logarithm of the denominator; each
    float32 [T]. ``to_gradient`` gives that of the logits in a dtype, in their place if it is theirs, from those of the
    log-probabilities (``1[j = target] - p_j``) and of the entropies (``-p_j (log p_j + entropy)``).
    """
    if current().fused_kernels:
        return _FusedSoftmax(vocabulary, scale)
    return _SlicedSoftmax(tokens, vocabulary, scale, device)


@dataclass(frozen=True, slots=True)
class _FusedSoftmax:
    """Reads the logits once, by a kernel."""

    vocabulary: Vocabulary
    scale: float

    def statistics(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from vime.training.kernels.softmax import row_statistics

        mine = row_statistics(logits, self._columns(targets), self.scale)
        peak = self.vocabulary.max(mine.peak.clone())
        shift = mine.peak - peak
        shrink = shift.exp()
        sums = torch.stack(
            (mine.chosen, mine.denominator * shrink, (mine.weighted + shift * mine.denominator) * shrink)
        )
        chosen, total, weighted = self.vocabulary.sum(sums)
        return _of_sums(chosen - peak, total, weighted, peak)

    def to_gradient(
        self,
        logits: Tensor,
        dtype: torch.dtype,
        targets: Tensor,
        log_sums: Tensor,
        entropy: Tensor,
        d_chosen: Tensor | None,
        d_entropy: Tensor | None,
    ) -> Tensor:
        from vime.training.kernels.softmax import logits_to_gradient

        none = torch.zeros_like(entropy)
        of_chosen, of_entropy = (none if g is None else g.contiguous() for g in (d_chosen, d_entropy))
        out = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
        known = self._columns(targets), log_sums, entropy
        return logits_to_gradient(logits, *known, of_chosen, of_entropy, self.scale, out)

    def _columns(self, targets: Tensor) -> Tensor:
        column, mine = _columns(targets, self.vocabulary)
        return column.squeeze(1).masked_fill(~mine, -1)


class _SlicedSoftmax:
    """A slice at a time, in two float32 buffers that are used again for every slice: fresh memory of that size costs
    more than what is computed in it."""

    def __init__(self, tokens: int, vocabulary: Vocabulary, scale: float, device: torch.device) -> None:
        self._vocabulary, self._scale, self._elements = vocabulary, scale, current().slice_elements
        shape = (min(max(self._elements // vocabulary.size, 1), tokens), vocabulary.size)
        self._first, self._second = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))

    def statistics(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = [
            _statistics(self._scores(logits[part]), self._second, targets[part], self._vocabulary)
            for part in self._parts(logits)
        ]
        log_probs, entropy, log_sums = (torch.cat(parts) for parts in zip(*found, strict=True))
        return log_probs, entropy, log_sums

    def to_gradient(
        self,
        logits: Tensor,
        dtype: torch.dtype,
        targets: Tensor,
        log_sums: Tensor,
        entropy: Tensor,
        d_chosen: Tensor | None,
        d_entropy: Tensor | None,
    ) -> Tensor:
        out = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
        for part in self._parts(logits):
            log_probs = self._scores(logits[part]).sub_(log_sums[part, None])
            gradients = (None if g is None else g[part] * self._scale for g in (d_chosen, d_entropy))
            out[part] = _gradient(log_probs, targets[part], entropy[part], self._vocabulary, *gradients)
        return out

    def _parts(self, logits: Tensor) -> list[slice]:
        return _blocks(len(logits), self._vocabulary.size, self._elements)

    def _scores(self, logits: Tensor) -> Tensor:
        """The logits times the scale, in the first buffer."""
        return self._first[: len(logits)].copy_(logits).mul_(self._scale)


def _statistics(
    scores: Tensor, buffer: Tensor, targets: Tensor, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the targets, entropy, and logarithm of the softmax's denominator; overwrites both buffers."""
    peak = vocabulary.max(scores.amax(-1))
    scores.sub_(peak[:, None])
    column, mine = _columns(targets, vocabulary)
    chosen = scores.gather(1, column).squeeze(1).masked_fill_(~mine, 0.0)
    weights = torch.exp(scores, out=buffer[: len(scores)])
    denominator = weights.sum(-1)
    sums = torch.stack((chosen, denominator, weights.mul_(scores).sum(-1)))
    chosen, total, weighted = vocabulary.sum(sums)
    return _of_sums(chosen, total, weighted, peak)


def _of_sums(chosen: Tensor, total: Tensor, weighted: Tensor, peak: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics of a row, from its scores relative to the peak: the target's, and the sums of ``exp(s)`` and
    ``s exp(s)``."""
    log_total = total.log()
    return chosen - log_total, log_total - weighted / total, log_total + peak


def _gradient(
    log_probs: Tensor,
    targets: Tensor,
    entropy: Tensor,
    vocabulary: Vocabulary,
    d_chosen: Tensor | None,
    d_entropy: Tensor | None,
) -> Tensor:
    """The gradient of the logits; ``log_probs`` are of all columns and are overwritten."""
    d_chosen = torch.zeros_like(entropy) if d_chosen is None else d_chosen
    if d_entropy is None:
        gradient = log_probs.exp_().mul_(-d_chosen[:, None])
    else:
        factor = (log_probs + entropy[:, None]).mul_(-d_entropy[:, None]).sub_(d_chosen[:, None])
        gradient = log_probs.exp_().mul_(factor)
    column, mine = _columns(targets, vocabulary)
    return gradient.scatter_add_(1, column, (d_chosen * mine)[:, None])


def _columns(targets: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Where each target stands in this rank's columns [T, 1], and whether it does at all [T]."""
    local = targets - vocabulary.start
    mine = (local >= 0) & (local < vocabulary.size)
    return local.clamp(0, vocabulary.size - 1)[:, None], mine


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total [V, H] plus left [T, V] transposed times right [T, H]. Sums of several blocks are kept in float32."""
    if current().fused_kernels and left.dtype != torch.float32:
        if total is None:
            return torch.mm(left.t(), right, out_dtype=torch.float32)
        return torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)
    part = left.t() @ right
    return part if total is None else total.float().add_(part)
