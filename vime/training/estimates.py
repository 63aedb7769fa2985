"""Advantages of the tokens of a micro-batch, as actor and critic both see them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vime.algorithms.advantages import AdvantageSettings, PackedSamples
from vime.algorithms.corrections import ImportanceSampling, importance_weights
from vime.config.sections import Algorithm
from vime.training.loss import no_log_probs, not_finite
from vime.training.packing import MicroBatch
from vime.types import TrainBatch

__all__ = ["advantages_of", "drop_not_finite", "drop_without_weight", "weight_scales"]

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


def weight_scales(
    batch: TrainBatch,
    packs: Sequence[MicroBatch],
    old: Sequence[Tensor | None],
    settings: ImportanceSampling,
    sum_over_ranks: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """What the importance weights of each micro-batch are multiplied by, so that the mean over the trained tokens of
    its step is 1: a float32 scalar each. Where all weights are 0 they stay so.

    Args:
        old: log-probs of the policy before the update.
        sum_over_ranks: adds up a float64 tensor of every rank that has samples of its own.
    """
    steps = [number for number, step in enumerate(batch.steps) for _ in step.micro_batches]
    sums = torch.zeros(len(batch.steps), 2, dtype=torch.float64, device=packs[0].mask_t.device)
    for number, pack, old_t in zip(steps, packs, old, strict=True):
        assert old_t is not None, "their pass comes first"
        if pack.rollout_log_probs_t is None:
            raise no_log_probs("--use-tis", pack)
        found = importance_weights(old_t, pack.rollout_log_probs_t, pack.mask_t, pack.lengths_n, settings)
        sums[number] += torch.stack((found.weights_t[pack.mask_t].double().sum(), pack.mask_t.double().sum()))
    weights, tokens = sum_over_ranks(sums).unbind(1)
    scales = torch.where(weights > 0, tokens / weights, 1.0).float()
    return [scales[number] for number in steps]


def drop_not_finite(advantages_t: Tensor, pack: MicroBatch, *, what: str = "an advantage") -> int:
    """Takes samples that have an advantage which is not finite out of training, in place; returns how many.

    They keep their place in the denominators.
    """
    bad_n = not_finite(advantages_t, pack)
    names = [index for index, bad in zip(pack.indices, bad_n.tolist(), strict=True) if bad]
    if names:
        logger.warning("sample %s: %s is not finite; not trained on", ", ".join(map(str, names)), what)
        bad_t = bad_n.repeat_interleave(pack.lengths_n, output_size=len(advantages_t))
        advantages_t.masked_fill_(bad_t, 0.0)
        pack.mask_t.masked_fill_(bad_t, False)
    return len(names)


def drop_without_weight(pack: MicroBatch) -> int:
    """The same for samples whose importance weights are no numbers, because a log-prob of the engine is none; infinite
    ones are bounded, as any weight is."""
    if pack.rollout_log_probs_t is None:
        return 0
    unknown_t = pack.rollout_log_probs_t.isnan()
    weights_t = torch.zeros_like(pack.rollout_log_probs_t).masked_fill(unknown_t, math.nan)
    return drop_not_finite(weights_t, pack, what="a log-prob of the engine, and with it an importance weight,")
