"""The objective of one micro-batch: its part of the loss of the whole step, and its part of every metric.

Loss and metrics are partial sums with the weights of ``vime.algorithms.reduce``; adding up the parts of all
micro-batches and ranks gives exactly the value of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from vime.algorithms import reduce
from vime.algorithms.advantages import AdvantageEstimator, PolicyTokens
from vime.algorithms.corrections import ImportanceSampling, importance_weights, off_policy_sequences
from vime.algorithms.kl import kl
from vime.algorithms.policy_loss import ClipRange
from vime.algorithms.ratio import log_ratio
from vime.config import Config
from vime.config.sections import OffPolicy
from vime.plugins import Hook
from vime.training.logprobs import TokenLogProbs
from vime.training.model import answer_of, run
from vime.training.packing import MicroBatch
from vime.types import InvalidSample

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "Given",
    "LossSettings",
    "Partial",
    "PolicyObjective",
    "importance_sampling",
    "no_log_probs",
    "not_finite",
    "of_trained_tokens",
    "policy_objective",
]

D = TypeVar("D", bound="DataclassInstance")


class Correct(Protocol):
    """A custom function in place of the importance weights."""

    @property
    def hook(self) -> Hook: ...

    def __call__(self, loss_t: Tensor, trainer_t: Tensor, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Loss [T], the trainer's log-probs [T] and micro-batch → the corrected loss, and what is worth watching of
        tokens."""


MakeMean: TypeAlias = Callable[[MicroBatch, reduce.Reduction], Callable[[Tensor], Tensor]]
"""Micro-batch and the usual mean → the mean of the policy loss."""

ABS_DIFF = "train/train_rollout_logprob_abs_diff"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The terms of the loss."""

    estimator: AdvantageEstimator
    clip: ClipRange
    kl_kind: str
    kl_coef: float  # of the KL term in the loss; 0 reports it only
    unbiased_kl: bool  # weigh each token's KL by π / π_old
    entropy_coef: float
    per_token: bool  # weigh tokens alike, not samples
    dr_grpo_divisor: float | None  # what the policy loss of a sample is divided by; None: as all else, by its tokens
    importance: ImportanceSampling  # how the weights of the engine's tokens are made, which are always reported
    weighted: bool  # whether they weigh the loss
    opsm_delta: float | None  # None: no sample is left out for having been moved away from
    rollout_is_old: bool  # the old log-probs are those of the engine
    correct: Correct | None = None  # in place of the importance weights
    make_mean: MakeMean | None = None  # of the policy loss, in place of its usual mean

    @classmethod
    def of(cls, config: Config, correct: Correct | None = None, make_mean: MakeMean | None = None) -> LossSettings:
        algorithm, off_policy = config.algorithm, config.off_policy
        return cls(
            estimator=algorithm.estimator,
            clip=ClipRange(low=algorithm.eps_clip, high=algorithm.eps_clip_high, dual=algorithm.eps_clip_c),
            kl_kind=algorithm.kl_loss_type,
            kl_coef=algorithm.kl_loss_coef,
            unbiased_kl=algorithm.use_unbiased_kl,
            entropy_coef=algorithm.entropy_coef,
            per_token=config.batch.calculate_per_token_loss,
            dr_grpo_divisor=algorithm.dr_grpo_divisor if algorithm.use_dr_grpo else None,
            importance=importance_sampling(off_policy),
            weighted=off_policy.use_tis,
            opsm_delta=off_policy.opsm_delta if off_policy.use_opsm else None,
            rollout_is_old=off_policy.use_rollout_logprobs,
            correct=correct,
            make_mean=make_mean,
        )


def importance_sampling(off_policy: OffPolicy) -> ImportanceSampling:
    return ImportanceSampling(
        level=off_policy.tis_level,
        mode=off_policy.tis_mode,
        low=off_policy.tis_clip_low,
        high=off_policy.tis_clip,
        veto=off_policy.tis_veto,
    )


@dataclass(slots=True, kw_only=True)
class Given:
    """What is known of the tokens of a micro-batch before its training pass, each float32 [T]."""

    advantages_t: Tensor
    old_log_probs_t: Tensor | None = None  # None: the policy has not moved, so they are the current ones
    ref_log_probs_t: Tensor | None = None  # None: there is no KL term
    weight_scale: Tensor | None = None  # float32 scalar: what makes the mean importance weight of the step 1
    teacher_gap_t: Tensor | None = None  # log π_old - log π_teacher; None: there is no teacher
    dropped: int = 0  # samples whose advantages were not finite, and which have no trained token for it


@dataclass(frozen=True, slots=True)
class Partial:
    """A micro-batch's part of the metrics of a step, by name."""

    sums: dict[str, Tensor]  # to be added up
    maxima: dict[str, Tensor]
    suspects_n: Tensor | None = None  # bool, the samples whose loss is not finite
    hook: Hook | None = None  # the custom function that named some of them


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
    batch, given = of_trained_tokens(batch, batch.mask_t), of_trained_tokens(given, batch.mask_t)
    terms = _Terms(answer, batch, given, settings)
    policy, entropy = terms.policy(), answer.entropy_t
    pg_loss, entropy_loss, every = _policy_mean(batch, mean, settings)(policy), mean(entropy), policy + entropy
    loss = pg_loss - settings.entropy_coef * entropy_loss if settings.entropy_coef else pg_loss
    sums = {"train/pg_loss": pg_loss, "train/entropy_loss": entropy_loss}
    if given.ref_log_probs_t is not None:
        divergence = terms.kl(given.ref_log_probs_t)
        sums["train/kl_loss"], every = mean(divergence), every + divergence
        loss = loss + settings.kl_coef * sums["train/kl_loss"] if settings.kl_coef else loss
    sums["train/loss"] = loss
    sums |= {name: mean(values_t) for name, values_t in terms.watched().items()}
    if given.teacher_gap_t is not None:
        sums["train/opd_kl"] = mean(given.teacher_gap_t)
    sums["train/nonfinite_samples"] = torch.tensor(float(given.dropped), device=loss.device)
    sums = {name: value.detach() for name, value in sums.items()}
    hook = None if settings.correct is None else settings.correct.hook
    return loss, Partial(sums, terms.maxima, not_finite(every.detach(), batch), hook)


def no_log_probs(flag: str, batch: MicroBatch) -> InvalidSample:
    names = ", ".join(map(str, batch.indices))
    return InvalidSample(f"{flag} needs rollout_log_probs of every sample; one of sample {names} has none")


def not_finite(values_t: Tensor, batch: MicroBatch) -> Tensor:
    """The samples that have a trained token at which the value is not finite, bool [N]."""
    return reduce.segment_sum((~values_t.isfinite() & batch.mask_t).long(), batch.lengths_n) > 0


def of_trained_tokens(known: D, mask_t: Tensor) -> D:
    """The same with 0 for every float of a token that is not trained (fields ``…_t``, [T]).

    Nobody looks at the loss of such a token, but its derivative, which is then 0, is multiplied by what is known of the
    token: a single NaN there would be one in every weight.
    """
    values = {field.name: getattr(known, field.name) for field in dataclasses.fields(known)}
    floats = {n: x for n, x in values.items() if n.endswith("_t") and x is not None and x.is_floating_point()}
    return dataclasses.replace(known, **{name: x.masked_fill(~mask_t, 0.0) for name, x in floats.items()})


def _policy_mean(batch: MicroBatch, mean: reduce.Reduction, settings: LossSettings) -> Callable[[Tensor], Tensor]:
    """Of the policy loss alone; entropy, KL and metrics keep theirs."""
    if settings.make_mean is not None:
        return settings.make_mean(batch, mean)
    if settings.dr_grpo_divisor is None:
        return mean
    return reduce.by_length(batch.mask_t, num_samples=mean.denominator, length=settings.dr_grpo_divisor)


class _Terms:
    """The terms of the loss of each token, and on the way what is worth watching of them, float or bool [T]."""

    def __init__(self, answer: TokenLogProbs, batch: MicroBatch, given: Given, settings: LossSettings) -> None:
        self._batch, self._settings = batch, settings
        self._log_probs, self._current = answer.log_probs_t, answer.log_probs_t.detach()
        self._old = self._current if given.old_log_probs_t is None else given.old_log_probs_t
        self._advantages, self._weight_scale = given.advantages_t, given.weight_scale
        self._clamped = torch.zeros_like(batch.mask_t)
        self._watched: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}

    def policy(self) -> Tensor:
        """The policy loss, corrected."""
        batch, settings = self._batch, self._settings
        tokens = PolicyTokens(
            log_probs_t=self._log_probs,
            old_log_probs_t=self._old,
            advantages_t=self._advantages,
            mask_t=batch.mask_t,
            lengths_n=batch.lengths_n,
        )
        surrogate = settings.estimator.policy_loss(tokens, settings.clip)
        self._clamped |= surrogate.clamped_t
        self._watched |= {
            "train/pg_clipfrac": surrogate.clipped_t,
            "train/ppo_kl": self._old - self._current,
            "train/ois": log_ratio(self._current, self._old).values_t.exp(),
            "rollout/log_probs": self._old,
            "rollout/advantages": self._advantages,
        }
        return self._without_off_policy_samples(self._weighted(surrogate.loss_t))

    def kl(self, ref_log_probs: Tensor) -> Tensor:
        """The divergence from the reference."""
        old = self._old if self._settings.unbiased_kl else None
        estimate = kl(self._log_probs, ref_log_probs, self._settings.kl_kind, old_log_probs_t=old)
        self._clamped |= estimate.clamped_t
        self._watched["rollout/ref_log_probs"] = ref_log_probs
        return estimate.values_t

    def watched(self) -> dict[str, Tensor]:
        """By the name of the metric."""
        return {**self._watched, "train/log_ratio_clamped": self._clamped}

    def _weighted(self, loss: Tensor) -> Tensor:
        """The loss times the importance weights; how trainer and engine differ is watched in any case.

        Where the engine's log-probs count as the old ones, it is the present policy that they are compared with.
        """
        batch, settings = self._batch, self._settings
        if batch.rollout_log_probs_t is None:
            if settings.weighted:
                raise no_log_probs("--use-tis", batch)
            return loss
        trainer = self._current if settings.rollout_is_old else self._old
        correction = importance_weights(
            trainer, batch.rollout_log_probs_t, batch.mask_t, batch.lengths_n, settings.importance
        )
        difference, ratio = trainer - batch.rollout_log_probs_t, log_ratio(trainer, batch.rollout_log_probs_t)
        self._watched |= {
            "rollout/rollout_log_probs": batch.rollout_log_probs_t,
            ABS_DIFF: difference.abs(),
            "train/mismatch_kl": -difference,
            "train/mismatch_k3_kl": torch.expm1(ratio.values_t) - ratio.values_t,
            "train/tis": correction.weights_t,
            "train/tis_abs": (correction.ratios_t - 1).abs(),
            "train/tis_clipfrac": correction.bounded_t,
            "train/tis_vetofrac": correction.vetoed_t,
        }
        self.maxima[f"{ABS_DIFF}_max"] = torch.where(batch.mask_t, difference.abs(), 0.0).amax()
        if not settings.weighted:
            return loss
        if settings.correct is not None:
            loss, watched = settings.correct(loss, trainer, batch)
            self._watched |= watched
            return loss
        self._clamped |= correction.clamped_t
        weights = correction.weights_t
        return loss * (weights if self._weight_scale is None else weights * self._weight_scale)

    def _without_off_policy_samples(self, loss: Tensor) -> Tensor:
        if self._settings.opsm_delta is None:
            return loss
        batch = self._batch
        left_out = off_policy_sequences(
            self._current,
            self._old,
            self._advantages,
            batch.mask_t,
            batch.lengths_n,
            delta=self._settings.opsm_delta,
        )
        self._watched["train/opsm_maskfrac"] = left_out
        return loss.masked_fill(left_out, 0.0)
