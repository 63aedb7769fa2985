"""A rank's share of a rollout as hooks see it: lists with one entry a sample, in the order of the batch.

The trainer itself works on packed micro-batches; ``Rows`` goes from one to the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vime.training.packing import MicroBatch
from vime.types import TrainBatch

__all__ = ["Rows", "rollout_data"]


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the response tokens of each sample stand in the packed tensors of a rollout's micro-batches."""

    order: tuple[int, ...]  # position in the batch of each sample, as they are packed one after the other
    lengths: tuple[int, ...]  # response tokens of each sample, in that order
    counts: tuple[int, ...]  # samples of each micro-batch

    @classmethod
    def of(cls, batch: TrainBatch) -> Rows:
        micro_batches = [micro for step in batch.steps for micro in step.micro_batches]
        order = tuple(itertools.chain.from_iterable(micro_batches))
        return cls(order, tuple(batch.samples[i].response_length for i in order), tuple(map(len, micro_batches)))

    def split(self, packed: Sequence[Tensor]) -> list[Tensor]:
        """Packed tensors [T], one a micro-batch → one tensor a sample, in the order of the batch."""
        parts = torch.split(torch.cat(list(packed)), list(self.lengths))
        return [part for _, part in sorted(zip(self.order, parts, strict=True), key=lambda pair: pair[0])]

    def join(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """The way back."""
        parts = iter(rows[i] for i in self.order)
        return [torch.cat([next(parts) for _ in range(count)]) for count in self.counts]


def rollout_data(
    batch: TrainBatch, packs: Sequence[MicroBatch], **known: Sequence[Tensor] | Sequence[None]
) -> dict[str, Any]:
    """What hooks get: ``N`` samples, each with L tokens of which T are the response.

    Args:
        packs: the micro-batches of all steps, in their order.
        known: further values of response tokens, a tensor [T] of each micro-batch by name; None: nobody knows.

    Returns:
        ``tokens`` (int64 [L]), ``loss_masks`` (int64 [T]), perhaps ``rollout_log_probs``, ``values`` (a critic's) and
        what is ``known`` (float32 [T]), each a list of N tensors on the model's device; ``total_lengths``,
        ``response_lengths``, ``rewards``, ``raw_reward`` and ``graded`` (False: there is no reward, and both are 0),
        ``truncated``, ``sample_indices``, ``group_indices``, ``parent_indices`` and ``metadata``, each a list of N
        values.
    """
    rows, samples = Rows.of(batch), batch.samples
    device = packs[0].mask_t.device
    data: dict[str, Any] = {
        "tokens": [torch.tensor(sample.tokens, device=device) for sample in samples],
        "total_lengths": [sample.total_length for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "group_indices": [sample.group_index for sample in samples],
        "parent_indices": [sample.parent_index for sample in samples],
        "rewards": [sample.reward for sample in samples],
        "raw_reward": [sample.raw_reward for sample in samples],
        "graded": [sample.graded for sample in samples],
        "truncated": [sample.truncated for sample in samples],
        "metadata": [sample.metadata for sample in samples],
        "loss_masks": rows.split([pack.mask_t.long() for pack in packs]),
    }
    of_packs = {
        "rollout_log_probs": [pack.rollout_log_probs_t for pack in packs],
        "values": [pack.scores.values_t for pack in packs],
    }
    known = of_packs | known  # type: ignore[assignment]
    for name, values in known.items():
        tensors = [value for value in values if value is not None]
        if len(tensors) == len(packs):
            data[name] = rows.split([value.detach().clone() for value in tensors])
    return data
