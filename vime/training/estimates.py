"""Advantages of the tokens of a micro-batch, as actor and critic both see them."""

from __future__ import annotations

import logging

from torch import Tensor

from vime.algorithms.advantages import AdvantageSettings, PackedSamples
from vime.config.sections import Algorithm
from vime.training.loss import not_finite
from vime.training.packing import MicroBatch

__all__ = ["advantages_of", "drop_not_finite"]

logger = logging.getLogger(__name__)


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


def drop_not_finite(advantages_t: Tensor, pack: MicroBatch) -> int:
    """Takes samples that have an advantage which is not finite out of training, in place; returns how many.

    They keep their place in the denominators.
    """
    bad_n = not_finite(advantages_t, pack)
    names = [index for index, bad in zip(pack.indices, bad_n.tolist(), strict=True) if bad]
    if names:
        logger.warning("sample %s: an advantage is not finite; not trained on", ", ".join(map(str, names)))
        bad_t = bad_n.repeat_interleave(pack.lengths_n, output_size=len(advantages_t))
        advantages_t.masked_fill_(bad_t, 0.0)
        pack.mask_t.masked_fill_(bad_t, False)
    return len(names)
