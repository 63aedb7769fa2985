"""From values of tokens to one number, exactly, however samples are packed and spread over ranks.

A reduction is a weight for each token. The weights of all micro-batches of all data-parallel and context-parallel ranks
in a step add up to the whole, so the loss and every metric are a sum of partial sums:

    per sample   x  =  1/N  Σ_i  Σ_t m x / max(Σ_t m, 1)         weight  m / (max(Σ_t m, 1) N)
    per token    x  =  Σ_i Σ_t m x / Σ_i max(Σ_t m, 1)           weight  m / num_tokens
    by a length  x  =  1/N  Σ_i  Σ_t m x / length                weight  m / (length N)

with the mask m, and N and num_tokens of the whole step (``TrainStep.num_samples`` and ``.num_tokens``). A sample
without any trained token adds 0 to the sum and still counts in the denominator, as 1 of N and as one token.

Where one generate call made several samples (children), they share the denominator of the sample that was drawn, which
is one of N: ``x = 1/N Σ_i [Σ_c Σ_t m x / max(Σ_c Σ_t m, 1)]`` over samples i and their children c. Per token they are
samples like all others, and by a length their sums are divided by it together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Reduction", "by_length", "per_sample", "per_token", "segment_mean", "segment_sum"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """The weights of the tokens of one micro-batch. Calling it gives this micro-batch's part of the reduced value."""

    weights_t: Tensor  # float32, 0 where the token is not trained
    denominator: int  # N or num_tokens: what each weight has been divided by, besides what belongs to a sample

    def __call__(self, values_t: Tensor) -> Tensor:
        """``Σ_t w x``, a float32 scalar with gradient. What stands at masked tokens does not matter, even NaN."""
        assert values_t.shape == self.weights_t.shape, (values_t.shape, self.weights_t.shape)
        return (values_t.float().masked_fill(self.weights_t == 0, 0.0) * self.weights_t).sum()


def per_sample(
    mask_t: Tensor,
    lengths_n: Tensor,
    *,
    num_samples: int,
    trained_tokens_n: Tensor | None = None,
) -> Reduction:
    """Every sample has the same weight, whatever its length; the default of vime.

    Args:
        mask_t: bool or 0/1 [t], the tokens that are trained.
        lengths_n: int64 [n], the tokens of each sample here; they sum to t.
        num_samples: N of the whole step over all ranks.
        trained_tokens_n: ``Σ_t m`` of each whole sample and its siblings, to be given when there is more of it than
            the mask here says. Default: counted from the mask.
    """
    weights_t = mask_t.float()
    counts_n = segment_sum(weights_t, lengths_n) if trained_tokens_n is None else trained_tokens_n
    shares_n = 1.0 / (counts_n.clamp(min=1).float() * num_samples)
    return Reduction(weights_t * shares_n.repeat_interleave(lengths_n, output_size=mask_t.numel()), num_samples)


def per_token(mask_t: Tensor, *, num_tokens: int) -> Reduction:
    """Every trained token has the same weight (--calculate-per-token-loss).

    Args:
        mask_t: bool or 0/1 [t], the tokens that are trained.
        num_tokens: ``Σ_i max(Σ_t m, 1)`` of the whole step over all ranks.
    """
    return Reduction(mask_t.float() / max(num_tokens, 1), max(num_tokens, 1))


def by_length(mask_t: Tensor, *, num_samples: int, length: float) -> Reduction:
    """Every sample's sum is divided by the same length, so that a long answer is not let off lightly (--use-dr-grpo).

    Dr.GRPO, https://arxiv.org/abs/2503.20783, section 3.2.

    Args:
        mask_t: bool or 0/1 [t], the tokens that are trained.
        num_samples: N of the whole step over all ranks.
        length: tokens, the same in the whole run.
    """
    return Reduction(mask_t.float() / (length * num_samples), num_samples)


def segment_sum(values_t: Tensor, lengths_n: Tensor) -> Tensor:
    """The sum of the tokens of each sample, [n], with gradient; 0 for a sample without tokens."""
    samples_n = torch.arange(lengths_n.numel(), device=values_t.device)
    sample_of_t = samples_n.repeat_interleave(lengths_n, output_size=values_t.numel())
    return values_t.new_zeros(lengths_n.numel()).index_add(0, sample_of_t, values_t)


def segment_mean(values_t: Tensor, mask_t: Tensor, lengths_n: Tensor, *, total: bool = False) -> Tensor:
    """``Σ_t m x / max(Σ_t m, 1)`` of each sample, [n], with gradient; with ``total`` the sum alone.

    What stands at masked tokens does not matter, even NaN.
    """
    sums_n = segment_sum(values_t.masked_fill(~mask_t.bool(), 0.0), lengths_n)
    return sums_n if total else sums_n / segment_sum(mask_t.to(values_t.dtype), lengths_n).clamp(min=1)
