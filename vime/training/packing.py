"""From the samples of a micro-batch to the tensors of one packed forward pass.

Nothing is computed that nobody needs. Samples stand one after the other, without padding. Samples with the same prompt
share it where attention can branch. The token at position p is predicted from position p - 1: so a sample's last token
is not part of the pack, and only the positions just before response tokens need the output layer.

Shape suffixes: l tokens of the pack, t response tokens of all its samples, n samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vime.training.layers.rope import Rope
from vime.training.layers.segments import Segments, Tree
from vime.types import InvalidSample, TrainSample

__all__ = ["MicroBatch", "Packer"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MicroBatch:
    """One forward pass. What belongs to response tokens or samples is in the order of the samples."""

    tokens_l: Tensor  # int64
    positions_l: Tensor  # int64, from 0 in each sample
    segments: Segments
    predictors_t: Tensor  # int64, the position in the pack that predicts each response token
    targets_t: Tensor  # int64, the response tokens
    mask_t: Tensor  # bool, the response tokens that are trained
    lengths_n: Tensor  # int64, response tokens of each sample; they sum to t
    rewards_n: Tensor  # float32, what training uses
    rollout_log_probs_t: Tensor | None  # float32, of the engine; None when a sample has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Packer:
    """Packs samples for one model on one device."""

    device: torch.device
    dtype: torch.dtype  # of the model
    rope: Rope | None = None  # None when the model rotates by itself
    multiple: int = 1  # packs are filled up to a multiple of this, by a segment that nobody looks at
    tree_tokens: int = 0  # samples share a prompt as long as the segment has no more tokens; 0: never

    def pack(self, samples: Sequence[TrainSample]) -> MicroBatch:
        """The samples as one micro-batch.

        Raises:
            InvalidSample: a sample has no prompt, so nothing predicts its first response token.
        """
        layout = _Layout()
        for members in self._sharing(samples):
            layout.add(samples, members)
        layout.fill(self.multiple)
        positions = self._integers(layout.positions)
        segments = Segments.of(tuple(layout.trees), self.device)
        segments.rope = None if self.rope is None else self.rope.table(positions, self.dtype)
        return MicroBatch(
            tokens_l=self._integers(layout.tokens),
            positions_l=positions,
            segments=segments,
            predictors_t=self._integers([p for i in range(len(samples)) for p in layout.predictors[i]]),
            targets_t=self._integers([token for sample in samples for token in _response(sample)]),
            mask_t=self._integers([bit for sample in samples for bit in sample.loss_mask]).bool(),
            lengths_n=self._integers([sample.response_length for sample in samples]),
            rewards_n=self._floats([sample.reward for sample in samples]),
            rollout_log_probs_t=self._rollout_log_probs(samples),
        )

    def _sharing(self, samples: Sequence[TrainSample]) -> Iterator[list[int]]:
        """Positions of the samples of each segment: those with the same prompt, as many as may be in a tree."""
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for i, sample in enumerate(samples):
            by_prompt.setdefault(_prompt(sample), []).append(i)
        for prompt, members in by_prompt.items():
            tree, size = [members[0]], len(prompt) + samples[members[0]].response_length
            for i in members[1:]:
                size += samples[i].response_length
                if size > self.tree_tokens:
                    yield tree
                    tree, size = [], len(prompt) + samples[i].response_length
                tree.append(i)
            yield tree

    def _rollout_log_probs(self, samples: Sequence[TrainSample]) -> Tensor | None:
        values = [sample.rollout_log_probs for sample in samples]
        if any(value is None for value in values):
            return None
        return self._floats([x for value in values for x in value or ()])

    def _integers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)

    def _floats(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).to(self.device)


@dataclass(slots=True)
class _Layout:
    """A pack while it is put together."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    trees: list[Tree] = field(default_factory=list)
    predictors: dict[int, list[int]] = field(default_factory=dict)  # of each sample's response tokens

    def add(self, samples: Sequence[TrainSample], members: list[int]) -> None:
        """One segment: the prompt of all the members, then what is needed of each one's response."""
        prompt = _prompt(samples[members[0]])
        self._append(prompt, 0)
        last = len(self.tokens) - 1
        for i in members:
            start, response = len(self.tokens), _response(samples[i])
            self._append(response[:-1], len(prompt))
            self.predictors[i] = [last, *range(start, len(self.tokens))]
        lengths = [samples[i].response_length - 1 for i in members]
        self.trees.append((len(prompt), *lengths) if len(members) > 1 else (len(prompt) + lengths[0],))

    def fill(self, multiple: int) -> None:
        """Fills up to a multiple of that many tokens."""
        missing = -len(self.tokens) % multiple
        if missing:
            self._append((0,) * missing, 0)
            self.trees.append((missing,))

    def _append(self, tokens: tuple[int, ...], first_position: int) -> None:
        self.tokens += tokens
        self.positions += range(first_position, first_position + len(tokens))


def _prompt(sample: TrainSample) -> tuple[int, ...]:
    if sample.response_length >= sample.total_length:
        raise InvalidSample(f"sample {sample.index} (group {sample.group_index}) has no prompt token")
    return sample.tokens[: sample.total_length - sample.response_length]


def _response(sample: TrainSample) -> tuple[int, ...]:
    return sample.tokens[sample.total_length - sample.response_length :]
