"""Advantages of the tokens of a micro-batch, as actor and critic both see them."""

from __future__ import annotations

from torch import Tensor

from vime.algorithms.advantages import AdvantageSettings, PackedSamples
from vime.config.sections import Algorithm
from vime.training.packing import MicroBatch

__all__ = ["advantages_of"]


def advantages_of(
    batch: MicroBatch, algorithm: Algorithm, *, log_probs_t: Tensor | None, ref_log_probs_t: Tensor | None
) -> Tensor:
    """What the estimator says of each response token before any whitening, float32 [t]."""
    samples = PackedSamples(
        rewards_n=batch.rewards_n,
        lengths_n=batch.lengths_n,
        mask_t=batch.mask_t,
        log_probs_t=log_probs_t,
        ref_log_probs_t=ref_log_probs_t,
        values_t=batch.scores.values_t,
    )
    settings = AdvantageSettings(
        gamma=algorithm.gamma, lambd=algorithm.lambd, kl_coef=algorithm.kl_coef, kl_kind=algorithm.kl_loss_type
    )
    return algorithm.estimator.advantages(samples, settings)
