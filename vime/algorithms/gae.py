"""Rewards and advantages of single tokens, over the tokens that are trained and no others.

What is not trained (a tool's answer, a user's turn) is no step of the policy: the step after a trained token is the
next trained one of its sample, whatever stands between, and a sample's reward arrives at its last trained token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vime.algorithms.reduce import segment_sum

__all__ = ["gae", "token_rewards"]


def token_rewards(rewards_n: Tensor, mask_t: Tensor, lengths_n: Tensor, *, penalties_t: Tensor | None = None) -> Tensor:
    """``r_t = 1[t is the last trained token of i] R_i - p_t``, and 0 where nothing is trained.

    Args:
        rewards_n: float [n], of whole samples. That of a sample without any trained token goes nowhere.
        mask_t: bool or 0/1 [t], the tokens that are trained.
        lengths_n: int64 [n], the tokens of each sample; they sum to t.
        penalties_t: float [t], what each token costs, ``kl_coef · KL_t`` for instance (section 2.2 of
            https://arxiv.org/abs/2203.02155 with that KL estimate).

    Returns:
        Float [t], like ``rewards_n``.
    """
    steps = _Steps.of(mask_t, lengths_n)
    rewards_t = rewards_n.new_zeros(mask_t.shape)
    if penalties_t is not None:
        rewards_t[steps.tokens_s] -= penalties_t[steps.tokens_s].to(rewards_t.dtype)
    has_steps_n = steps.counts_n > 0
    rewards_t[steps.tokens_s[steps.left_s == 0]] += rewards_n[has_steps_n]
    return rewards_t


def gae(
    rewards_t: Tensor, values_t: Tensor, mask_t: Tensor, lengths_n: Tensor, *, gamma: float = 1.0, lambd: float = 1.0
) -> Tensor:
    """``A_t = δ_t + γ λ A_{t+1}`` with ``δ_t = r_t + γ V_{t+1} - V_t``, and 0 behind the last step of a sample.

    https://arxiv.org/abs/1506.02438, equations 11, 12 and 16. With values of 0 and ``lambd`` 1 these are discounted
    returns; ``A_t + V_t`` is what the critic learns. Sums are float64.

    Args:
        rewards_t: float [t]; those of tokens that are not trained do not count.
        values_t: float [t], of the state before each token.
        mask_t: bool or 0/1 [t], the tokens that are trained.
        lengths_n: int64 [n], the tokens of each sample; they sum to t.

    Returns:
        Float [t], like ``values_t``; 0 where nothing is trained.
    """
    steps = _Steps.of(mask_t, lengths_n)
    rewards_s, values_s = rewards_t[steps.tokens_s].double(), values_t[steps.tokens_s].double()
    deltas_s = rewards_s + gamma * steps.later(values_s, 1) - values_s
    advantages_t = torch.zeros_like(values_t)
    advantages_t[steps.tokens_s] = _discounted_sums(deltas_s, steps, gamma * lambd).to(values_t.dtype)
    return advantages_t


class _Steps(NamedTuple):
    """The trained tokens of all samples, one sample after the other; s counts them."""

    tokens_s: Tensor  # int64, where each stands among all tokens
    counts_n: Tensor  # int64, of each sample
    left_s: Tensor  # int64, how many of the same sample come after each

    @classmethod
    def of(cls, mask_t: Tensor, lengths_n: Tensor) -> _Steps:
        tokens_s = mask_t.nonzero().squeeze(1)
        counts_n = segment_sum((mask_t != 0).long(), lengths_n)
        last_s = (counts_n.cumsum(0) - 1).repeat_interleave(counts_n, output_size=len(tokens_s))
        return cls(tokens_s, counts_n, last_s - torch.arange(len(tokens_s), device=tokens_s.device))

    def later(self, values_s: Tensor, distance: int) -> Tensor:
        """The value ``distance`` steps later in the same sample; 0 where it has ended by then."""
        shifted_s = values_s.roll(-distance, 0)
        return shifted_s.masked_fill(self.left_s < distance, 0.0)


def _discounted_sums(values_s: Tensor, steps: _Steps, factor: float) -> Tensor:
    """``y_s = x_s + factor · y_{s+1}``, in as many passes as the longest sample has binary digits.

    Before the pass of distance d, y_s is the sum of the d terms from s on; that of the next d stands d steps later.
    """
    distance, sums_s = 1, values_s
    longest = int(steps.counts_n.max()) if len(steps.counts_n) else 0
    while distance < longest:
        sums_s = sums_s + factor**distance * steps.later(sums_s, distance)
        distance *= 2
    return sums_s
