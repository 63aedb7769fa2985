"""The objective of one micro-batch: its part of the loss of the whole step, and its part of every metric.

Loss and metrics are partial sums with the weights of ``vime.algorithms.reduce``; adding up the parts of all
micro-batches and ranks gives exactly the value of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vime.algorithms import reduce
from vime.algorithms.advantages import AdvantageEstimator, PolicyTokens
from vime.algorithms.kl import kl
from vime.algorithms.policy_loss import ClipRange
from vime.config import Config
from vime.training.logprobs import TokenLogProbs
from vime.training.model import answer_of, run
from vime.training.packing import MicroBatch

__all__ = ["Given", "LossSettings", "Partial", "PolicyObjective", "policy_objective"]

ABS_DIFF = "train/train_rollout_logprob_abs_diff"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The terms of the loss."""

    estimator: AdvantageEstimator
    clip: ClipRange
    kl_kind: str
    kl_coef: float  # of the KL term in the loss; 0 reports it only
    entropy_coef: float
    per_token: bool  # weigh tokens alike, not samples

    @classmethod
    def of(cls, config: Config) -> LossSettings:
        algorithm = config.algorithm
        return cls(
            estimator=algorithm.estimator,
            clip=ClipRange(low=algorithm.eps_clip, high=algorithm.eps_clip_high, dual=algorithm.eps_clip_c),
            kl_kind=algorithm.kl_loss_type,
            kl_coef=algorithm.kl_loss_coef,
            entropy_coef=algorithm.entropy_coef,
            per_token=config.batch.calculate_per_token_loss,
        )


@dataclass(slots=True, kw_only=True)
class Given:
    """What is known of the tokens of a micro-batch before its training pass, each float32 [T]."""

    advantages_t: Tensor
    old_log_probs_t: Tensor | None = None  # None: the policy has not moved, so they are the current ones
    ref_log_probs_t: Tensor | None = None  # None: there is no KL term


@dataclass(frozen=True, slots=True)
class Partial:
    """A micro-batch's part of the metrics of a step, by name."""

    sums: dict[str, Tensor]  # to be added up
    maxima: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """Implements ``step.Objective`` for the actor."""

    settings: LossSettings
    temperature: float

    @property
    def per_token(self) -> bool:
        return self.settings.per_token

    def forward(self, chunk: Any, batch: MicroBatch) -> Tensor:
        return run(chunk, batch, self.temperature, entropy_gradient=self.settings.entropy_coef != 0)

    def loss(self, output: Tensor, batch: MicroBatch, given: Given, mean: reduce.Reduction) -> tuple[Tensor, Partial]:
        return policy_objective(answer_of(output), batch, given, mean, self.settings)


def policy_objective(
    answer: TokenLogProbs, batch: MicroBatch, given: Given, mean: reduce.Reduction, settings: LossSettings
) -> tuple[Tensor, Partial]:
    """This micro-batch's part of ``mean(L) - entropy_coef mean(H) + kl_coef mean(KL)``, and of the metrics."""
    log_probs = answer.log_probs_t
    old = log_probs.detach() if given.old_log_probs_t is None else given.old_log_probs_t
    tokens = PolicyTokens(
        log_probs_t=log_probs,
        old_log_probs_t=old,
        advantages_t=given.advantages_t,
        mask_t=batch.mask_t,
        lengths_n=batch.lengths_n,
    )
    surrogate = settings.estimator.policy_loss(tokens, settings.clip)
    pg_loss, entropy = mean(surrogate.loss_t), mean(answer.entropy_t)
    loss = pg_loss - settings.entropy_coef * entropy if settings.entropy_coef else pg_loss
    sums = {
        "train/pg_loss": pg_loss,
        "train/entropy_loss": entropy,
        "train/pg_clipfrac": mean(surrogate.clipped_t),
        "train/ppo_kl": mean(old - log_probs),
        "train/log_ratio_clamped": mean(surrogate.clamped_t),
        "rollout/log_probs": mean(old),
        "rollout/advantages": mean(given.advantages_t),
    }
    if given.ref_log_probs_t is not None:
        kl_loss = mean(kl(log_probs, given.ref_log_probs_t, settings.kl_kind).values_t)
        loss = loss + settings.kl_coef * kl_loss if settings.kl_coef else loss
        sums |= {"train/kl_loss": kl_loss, "rollout/ref_log_probs": mean(given.ref_log_probs_t)}
    maxima = _compare_with_rollout(old, batch, mean, sums)
    sums["train/loss"] = loss
    return loss, Partial({name: value.detach() for name, value in sums.items()}, maxima)


def _compare_with_rollout(
    old: Tensor, batch: MicroBatch, mean: reduce.Reduction, sums: dict[str, Tensor]
) -> dict[str, Tensor]:
    """How far the engine's log-probs are from those of the trainer with the weights that it sampled from."""
    if batch.rollout_log_probs_t is None:
        return {}
    difference = (old.detach() - batch.rollout_log_probs_t).abs()
    sums[ABS_DIFF] = mean(difference)
    sums["rollout/rollout_log_probs"] = mean(batch.rollout_log_probs_t)
    return {f"{ABS_DIFF}_max": torch.where(batch.mask_t, difference, 0.0).amax()}
