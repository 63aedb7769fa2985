"""Log-probability and entropy of chosen tokens, from hidden states, without keeping fp32 logits.

The one definition (actor, reference and engine alike): log-softmax over the whole vocabulary, in float32, of the
logits divided by the rollout temperature. The output layer runs only where a token is wanted, and what softmax needs
in float32 exists for a few tokens at a time.

Shape suffixes: t wanted tokens, h hidden size, v rows of the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vime.platform import current

__all__ = ["TokenLogProbs", "Vocabulary", "token_log_probs"]

LOGIT_ELEMENTS = 1 << 28
"""Logits are kept for the backward pass up to this many elements (512 MiB in bf16). Beyond it they are computed block
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
) -> TokenLogProbs:
    """What the model says about ``targets_t`` (int64, ids in the whole vocabulary) from these hidden states.

    Under tensor parallelism the gradient of ``hidden_th`` is this rank's part; the caller's communication adds them up.
    """
    inverse = 1.0 / temperature
    answer = _Head.apply(hidden_th, weight_vh, targets_t, vocabulary, inverse)  # type: ignore[no-untyped-call]
    return TokenLogProbs(*answer)


class _Head(torch.autograd.Function):
    """Output layer, softmax and choice in one, so that nothing of size T·V lives in float32."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary, scale: float
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        log_probs, entropy, log_sums = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        blocks = _blocks(len(hidden), vocabulary.size, LOGIT_ELEMENTS)
        scratch = _Scratch(len(hidden), vocabulary.size, hidden.device)
        logits = None
        for block in blocks:
            logits = hidden[block] @ weight[: vocabulary.size].t()
            for part, here in scratch.parts(block):
                found = _statistics(scratch.scores(logits[part], scale), scratch.second, targets[here], vocabulary)
                log_probs[here], entropy[here], log_sums[here] = found
        ctx.save_for_backward(hidden, weight, targets, entropy, log_sums)
        ctx.vocabulary, ctx.scale, ctx.blocks = vocabulary, scale, blocks
        ctx.kept_logits = logits if len(blocks) == 1 and any(ctx.needs_input_grad) else None
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, d_log_probs: Tensor | None, d_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, targets, entropy, log_sums = ctx.saved_tensors
        rows = weight[: ctx.vocabulary.size]
        scratch = _Scratch(len(hidden), ctx.vocabulary.size, hidden.device)
        d_hidden = torch.empty_like(hidden)
        d_rows = None
        for block in ctx.blocks:
            logits, ctx.kept_logits = ctx.kept_logits, None  # it is overwritten; a second backward computes it again
            logits = hidden[block] @ rows.t() if logits is None else logits
            for part, here in scratch.parts(block):
                scores = scratch.scores(logits[part], ctx.scale).sub_(log_sums[here, None])
                gradients = (None if g is None else g[here] * ctx.scale for g in (d_log_probs, d_entropy))
                logits[part] = _gradient(scores, targets[here], entropy[here], ctx.vocabulary, *gradients)
            torch.mm(logits, rows, out=d_hidden[block])
            d_rows = _added(d_rows, logits.t() @ hidden[block])
        if d_rows is None:  # a context-parallel rank may have no response token to predict
            return d_hidden, torch.zeros_like(weight), None, None, None
        d_weight = d_rows.to(weight.dtype)
        if len(rows) < len(weight):
            d_weight = F.pad(d_weight, (0, 0, 0, len(weight) - len(rows)))
        return d_hidden, d_weight, None, None, None


def _blocks(tokens: int, width: int, elements: int) -> list[slice]:
    """Cuts the tokens so that no block of ``width`` columns has more elements than that."""
    step = max(elements // width, 1)
    return [slice(at, min(at + step, tokens)) for at in range(0, tokens, step)]


class _Scratch:
    """Two float32 buffers for a slice of logits, used again for every slice: fresh memory of that size costs more than
    what is computed in it."""

    def __init__(self, tokens: int, width: int, device: torch.device) -> None:
        self._width, self._elements = width, current().slice_elements
        shape = (min(max(self._elements // width, 1), tokens), width)
        self._first, self.second = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))

    def parts(self, block: slice) -> Iterator[tuple[slice, slice]]:
        """Slices of a block that fit: inside the block, and in the whole."""
        for part in _blocks(block.stop - block.start, self._width, self._elements):
            yield part, slice(block.start + part.start, block.start + part.stop)

    def scores(self, logits: Tensor, scale: float) -> Tensor:
        """The logits times ``scale``, in the first buffer."""
        return self._first[: len(logits)].copy_(logits).mul_(scale)


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
    """The gradient of the logits, from those of the log-probabilities (``1[j = target] - p_j``) and of the entropy
    (``-p_j (log p_j + entropy)``). ``log_probs`` are of all columns and are overwritten."""
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


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    """Sums of several blocks are kept in float32."""
    return part if total is None else total.float().add_(part)
