"""Off-policy corrections: what to do about tokens that another policy sampled than the one that is taken for it.

The engine computes with other kernels than the trainer, and in an asynchronous run with older weights. So the policy
that sampled, π_roll, is not quite the π_old that the ratio of the policy loss starts from. An importance weight
``w = π_old / π_roll`` mends this; how, a few choices say:

    level       w of a token                                    bias and variance
    token       exp(log π_old - log π_roll)                     biased, low variance
    sequence    exp(Σ_t m (log π_old - log π_roll))             unbiased, high variance
    geometric   exp(mean over t of the same)                    biased, low variance, blind to the length

    mode        what becomes of w outside of [low, high]        known as
    truncate    min(w, high)                                    TIS
    clip        high above, low below                           TIS with two clips; truncate where low is 0
    mask        0, and w is kept inside                         IcePop (of tokens), masked importance sampling

Truncated importance sampling is from Yao et al., "Your efficient RL framework secretly brings you off-policy RL
training" (2025, fengyao.notion.site/off-policy-rl); IcePop from https://arxiv.org/abs/2510.18855; the levels, masks and
the veto from Liu et al., "When speed kills stability: demystifying RL collapse from the training-inference mismatch"
(2025, richardli.xyz/rl-collapse).

The denominators of means stay those of all trained tokens: a token that is masked here counts as one whose loss is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from vime.algorithms.ratio import LogRatio, log_ratio, sequence_log_ratio
from vime.algorithms.reduce import segment_mean, segment_sum

__all__ = ["Correction", "ImportanceSampling", "Level", "Mode", "importance_weights", "off_policy_sequences"]

Level: TypeAlias = Literal["token", "sequence", "geometric"]
Mode: TypeAlias = Literal["truncate", "clip", "mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceSampling:
    """Which weights, and how they are bounded.

    Raises:
        ValueError: the bounds are not ``0 <= low <= high``, or truncation is given a lower one.
    """

    level: Level = "token"  # --tis-level
    mode: Mode = "clip"  # --tis-mode
    low: float = 0.0  # --tis-clip-low
    high: float = 2.0  # --tis-clip
    veto: float | None = None  # --tis-veto: a sample with a trained token whose ratio is below this is left out

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ValueError(f"the bounds must be 0 <= low <= high, not {self.low:g} and {self.high:g}")
        if self.mode == "truncate" and self.low > 0:
            raise ValueError(f"truncation has no lower bound, so {self.low:g} has no meaning there")


class Correction(NamedTuple):
    """What the loss of each token is multiplied by. Without gradient."""

    weights_t: Tensor  # float [t], 0 where a token is left out
    ratios_t: Tensor  # float [t], the weights before any bound
    bounded_t: Tensor  # bool [t], the ratio was not within the bounds
    vetoed_t: Tensor  # bool [t], the whole sample was left out
    clamped_t: Tensor  # bool [t], the log-ratio left the range of ±20


def importance_weights(
    old_log_probs_t: Tensor,
    rollout_log_probs_t: Tensor,
    mask_t: Tensor,
    lengths_n: Tensor,
    settings: ImportanceSampling,
) -> Correction:
    """The weights ``π_old / π_roll`` of each token; see the module.

    Args:
        old_log_probs_t: float [t], of the policy before the update as the trainer computes it.
        rollout_log_probs_t: float [t], of the policy that sampled, as the engine computed them.
        mask_t: bool or 0/1 [t], the tokens that are trained; no other token counts in a sequence.
        lengths_n: int64 [n], the tokens of each sample; they sum to t.
        settings: which weights, and how they are bounded.
    """
    old_t = old_log_probs_t.detach()
    ratio = _ratio(settings.level, old_t, rollout_log_probs_t, mask_t, lengths_n)
    ratios_t = ratio.values_t.exp()
    over_t, under_t = ratios_t > settings.high, ratios_t < settings.low
    if settings.mode == "mask":
        weights_t = ratios_t.masked_fill(over_t | under_t, 0.0)
    else:
        weights_t = ratios_t.clamp(settings.low, settings.high)
    vetoed_t = _vetoed(settings.veto, old_t, rollout_log_probs_t, mask_t, lengths_n)
    weights_t = weights_t.masked_fill(vetoed_t, 0.0)
    return Correction(weights_t, ratios_t, over_t | under_t, vetoed_t, ratio.clamped_t)


def _ratio(level: Level, old_t: Tensor, rollout_t: Tensor, mask_t: Tensor, lengths_n: Tensor) -> LogRatio:
    if level == "token":
        return log_ratio(old_t, rollout_t)
    return sequence_log_ratio(old_t, rollout_t, mask_t, lengths_n, total=level == "sequence")


def _vetoed(threshold: float | None, old_t: Tensor, rollout_t: Tensor, mask_t: Tensor, lengths_n: Tensor) -> Tensor:
    """The tokens of samples in which a trained token is all but impossible for the trainer, bool [t]."""
    if threshold is None:
        return torch.zeros_like(mask_t, dtype=torch.bool)
    impossible_t = (log_ratio(old_t, rollout_t).values_t.exp() < threshold) & mask_t.bool()
    return _in_sample(segment_sum(impossible_t.long(), lengths_n) > 0, lengths_n, len(mask_t))


def off_policy_sequences(
    log_probs_t: Tensor,
    old_log_probs_t: Tensor,
    advantages_t: Tensor,
    mask_t: Tensor,
    lengths_n: Tensor,
    *,
    delta: float,
) -> Tensor:
    """The tokens whose loss is to be left out, bool [t]: ``A < 0`` in a sample that the policy has moved away from.

    A sample counts as such when the mean of ``log π_old - log π`` over its trained tokens, an estimate of
    KL(π_old ‖ π), is above ``delta``. Off-policy sequence masking of https://arxiv.org/abs/2512.02556, section 3.1:
    what the policy would not say any more cannot teach it what not to say.

    Args:
        log_probs_t: float [t] of the policy.
        old_log_probs_t: float [t] of the policy before the update.
        advantages_t: float [t].
        mask_t: bool or 0/1 [t], the tokens that are trained.
        lengths_n: int64 [n], the tokens of each sample; they sum to t.
        delta: nats a token.
    """
    divergence_n = segment_mean(old_log_probs_t - log_probs_t.detach(), mask_t, lengths_n)
    return (advantages_t < 0) & _in_sample(divergence_n > delta, lengths_n, len(mask_t))


def _in_sample(values_n: Tensor, lengths_n: Tensor, tokens: int) -> Tensor:
    return values_n.repeat_interleave(lengths_n, output_size=tokens)
