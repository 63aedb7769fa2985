"""From the samples of a micro-batch to the tensors of one packed forward pass.

Samples stand one after the other, without padding. The token at position p is predicted from position p - 1, so only
the positions just before response tokens need the output layer; all about response tokens is kept for these alone.

Shape suffixes: l tokens of the pack, t response tokens of all its samples, n samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from vime.training.layers.rope import Rope
from vime.training.layers.segments import Segments
from vime.types import InvalidSample, TrainSample

__all__ = ["MicroBatch", "Packer"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MicroBatch:
    """One forward pass."""

    tokens_l: Tensor  # int64
    positions_l: Tensor  # int64, from 0 in each sample
    segments: Segments
    predictors_t: Tensor  # int64, positions in the pack whose next token is a response token
    targets_t: Tensor  # int64, those response tokens
    mask_t: Tensor  # bool, the response tokens that are trained
    lengths_n: Tensor  # int64, response tokens of each sample; they sum to T
    rewards_n: Tensor  # float32, what training uses
    rollout_log_probs_t: Tensor | None  # float32, of the engine; None when a sample has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Packer:
    """Packs samples for one model on one device."""

    device: torch.device
    dtype: torch.dtype  # of the model
    rope: Rope | None = None  # None when the model rotates by itself
    multiple: int = 1  # packs are filled up to a multiple of this, by a segment that nobody looks at

    def pack(self, samples: Sequence[TrainSample]) -> MicroBatch:
        """The samples, in this order.

        Raises:
            InvalidSample: a sample has no prompt, so nothing predicts its first response token.
        """
        for sample in samples:
            if sample.response_length >= sample.total_length:
                raise InvalidSample(f"sample {sample.index} (group {sample.group_index}) has no prompt token")
        lengths = [sample.total_length for sample in samples]
        filling = -sum(lengths) % self.multiple
        tokens = [token for sample in samples for token in sample.tokens] + [0] * filling
        lengths += [filling] if filling else []
        positions = self._integers([position for length in lengths for position in range(length)])
        segments = Segments.of(tuple(lengths), self.device)
        segments.rope = None if self.rope is None else self.rope.table(positions, self.dtype)
        predictors = _predictors(samples)
        return MicroBatch(
            tokens_l=self._integers(tokens),
            positions_l=positions,
            segments=segments,
            predictors_t=self._integers(predictors),
            targets_t=self._integers([tokens[position + 1] for position in predictors]),
            mask_t=self._integers([bit for sample in samples for bit in sample.loss_mask]).bool(),
            lengths_n=self._integers([sample.response_length for sample in samples]),
            rewards_n=self._floats([sample.reward for sample in samples]),
            rollout_log_probs_t=self._rollout_log_probs(samples),
        )

    def _rollout_log_probs(self, samples: Sequence[TrainSample]) -> Tensor | None:
        values = [sample.rollout_log_probs for sample in samples]
        if any(value is None for value in values):
            return None
        return self._floats([x for value in values for x in value or ()])

    def _integers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)

    def _floats(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).to(self.device)


def _predictors(samples: Sequence[TrainSample]) -> list[int]:
    ends = accumulate(sample.total_length for sample in samples)
    return [
        position
        for sample, end in zip(samples, ends, strict=True)
        for position in range(end - sample.response_length - 1, end - 1)
    ]
