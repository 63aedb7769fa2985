"""From the samples of a micro-batch to the tensors of one packed forward pass.

Nothing is computed that nobody needs. Samples stand one after the other, without padding. Samples with the same prompt
share it where attention can branch. The token at position p is predicted from position p - 1: so a sample's last token
is not part of the pack, and only the positions just before response tokens need the output layer.

Under context parallelism a rank has only a part of the pack, and predicts only the response tokens whose predecessors
are in it. What belongs to response tokens or samples is whole on every rank all the same: the model's answers are put
together, so that losses and metrics need not know of it.

Shape suffixes: l tokens of the pack on this rank, t response tokens of all samples, p those that this rank predicts,
n samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vime.training.layers.context import ContextPart
from vime.training.layers.rope import Rope
from vime.training.layers.segments import Segments, Tree
from vime.training.replay import RolloutRoutes
from vime.types import InvalidSample, TrainSample, WeightVersion

__all__ = ["Ahead", "MicroBatch", "PackedScores", "Packer", "RankRoutes"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Ahead:
    """What the draft layer needs besides: it predicts response tokens from the token before the one before.

    A response token right after a prompt of one token has none, and is not predicted.
    """

    following_l: Tensor  # int64, the token of the same sample after each one of the pack; of what fills, any
    predictors_p: Tensor  # int64, the place on this rank from which each of its response tokens is predicted
    predicted_p: Tensor  # int64, which of the response tokens those are


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MicroBatch:
    """One forward pass. What belongs to response tokens or samples is in the order of the samples."""

    tokens_l: Tensor  # int64
    positions_l: Tensor  # int64, from 0 in each sample
    segments: Segments
    predictors_p: Tensor  # int64, the place on this rank from which each of its response tokens is predicted
    predicted_p: Tensor | None  # int64, which of the response tokens those are; None: all, in their order
    targets_t: Tensor  # int64, the response tokens
    mask_t: Tensor  # bool, the response tokens that are trained
    lengths_n: Tensor  # int64, response tokens of each sample; they sum to t
    sibling_tokens_n: Tensor  # int64, trained tokens of the other children of its parent, wherever they are
    rewards_n: Tensor  # float32, what training uses
    rollout_log_probs_t: Tensor | None  # float32, of the engine; None when a sample has none
    indices: tuple[int, ...]  # of the samples
    total_lengths: tuple[int, ...]  # tokens of each sample, prompts too
    response_lengths: tuple[int, ...]  # what lengths_n holds
    newest_version: WeightVersion | None  # of the weights that sampled a token; None where nobody knows
    scores: PackedScores
    rollout_routes: RolloutRoutes | None = None  # where training is to follow them
    ahead: Ahead | None = None  # where a draft layer is trained


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedScores:
    """What was said of the response tokens before this rollout's training, each float32 [t]; see ``TokenScores``."""

    values_t: Tensor | None = None
    log_probs_t: Tensor | None = None
    ref_log_probs_t: Tensor | None = None
    teacher_log_probs_t: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Packer:
    """Packs samples for one model on one device."""

    device: torch.device
    dtype: torch.dtype  # of the model
    rope: Rope | None = None  # None when the model rotates by itself
    multiple: int = 1  # packs are filled up to a multiple of this, by a segment that nobody looks at
    tree_tokens: int = 0  # samples share a prompt as long as the segment has no more tokens; 0: never
    part: ContextPart | None = None  # under context parallelism, which excludes shared prompts
    routes: RankRoutes | None = None  # where training follows the routes of rollouts
    ahead: bool = False  # a draft layer is trained, which excludes shared prompts: what follows one is not one token

    def pack(self, samples: Sequence[TrainSample]) -> MicroBatch:
        """The samples as one micro-batch.

        Raises:
            InvalidSample: a sample has no prompt, so nothing predicts its first response token.
        """
        layout = _Layout()
        for members in self._sharing(samples):
            layout.add(samples, members)
        filling = layout.fill(self.multiple)
        tokens, positions = (self._part(_integers(x)) for x in (layout.tokens, layout.positions))
        segments = Segments.of(tuple(layout.trees), self.device, self.part)
        segments.rope = None if self.rope is None else self.rope.table(positions, self.dtype)
        if filling:
            segments.filling = self._part(torch.arange(len(layout.tokens)) >= len(layout.tokens) - filling)
        predictors_t = _integers([p for i in range(len(samples)) for p in layout.predictors[i]])
        targets_t = _integers([token for sample in samples for token in _response(sample)])
        predictors_p, predicted_p = self._predictions(predictors_t, total=len(layout.tokens))
        return MicroBatch(
            tokens_l=tokens,
            positions_l=positions,
            segments=segments,
            predictors_p=predictors_p,
            predicted_p=predicted_p,
            targets_t=targets_t.to(self.device),
            mask_t=_integers([bit for sample in samples for bit in sample.loss_mask]).bool().to(self.device),
            lengths_n=_integers([sample.response_length for sample in samples]).to(self.device),
            sibling_tokens_n=_integers([sample.sibling_tokens for sample in samples]).to(self.device),
            rewards_n=self._floats([sample.reward for sample in samples]),
            rollout_log_probs_t=self._optional([sample.rollout_log_probs for sample in samples]),
            scores=PackedScores(
                values_t=self._optional([sample.scores.values for sample in samples]),
                log_probs_t=self._optional([sample.scores.log_probs for sample in samples]),
                ref_log_probs_t=self._optional([sample.scores.ref_log_probs for sample in samples]),
                teacher_log_probs_t=self._optional([sample.scores.teacher_log_probs for sample in samples]),
            ),
            indices=tuple(sample.index for sample in samples),
            total_lengths=tuple(sample.total_length for sample in samples),
            response_lengths=tuple(sample.response_length for sample in samples),
            newest_version=max((version for s in samples for version in s.weight_versions), default=None),
            rollout_routes=None if self.routes is None else self._rollout_routes(layout, filling, samples, self.routes),
            ahead=self._ahead(layout, predictors_t, targets_t) if self.ahead else None,
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

    def _part(self, whole_l: Tensor) -> Tensor:
        """What this rank has of the tokens of a pack."""
        return (whole_l if self.part is None else whole_l[self.part.tokens(len(whole_l))]).to(self.device)

    def _predictions(self, predictors_t: Tensor, total: int) -> tuple[Tensor, Tensor | None]:
        """``predictors_p`` and ``predicted_p`` of the micro-batch, from places in the whole pack."""
        if self.part is None:
            return predictors_t.to(self.device), None
        mine = self.part.tokens(total)
        place_l = torch.full((total,), -1).index_copy_(0, mine, torch.arange(len(mine)))
        places_t = place_l[predictors_t]
        predicted = (places_t >= 0).nonzero().squeeze(1)
        return places_t[predicted].to(self.device), predicted.to(self.device)

    def _ahead(self, layout: _Layout, predictors_t: Tensor, targets_t: Tensor) -> Ahead:
        """Made of the whole pack and then cut, so that what follows the last token of a part is right as well."""
        following = _integers([*layout.tokens[1:], 0])
        following[predictors_t] = targets_t  # a sample's last token is not part of the pack
        (predicted,) = (_integers(layout.positions)[predictors_t] > 0).nonzero(as_tuple=True)
        predictors_p, which = self._predictions(predictors_t[predicted] - 1, total=len(layout.tokens))
        return Ahead(
            following_l=self._part(following),
            predictors_p=predictors_p,
            predicted_p=predicted.to(self.device) if which is None else predicted.to(self.device)[which],
        )

    def _rollout_routes(
        self, layout: _Layout, filling: int, samples: Sequence[TrainSample], wanted: RankRoutes
    ) -> RolloutRoutes:
        """Of this rank's tokens and layers: nothing else is copied. What fills the pack goes to each expert in turn."""
        total, columns = len(layout.tokens), list(wanted.columns.values())
        whole = torch.arange(total) if self.part is None else self.part.tokens(total)
        mine = whole.chunk(wanted.parts)[wanted.part].numpy()  # places in the pack, in ascending order
        experts = np.zeros((len(columns), len(mine), wanted.top_k), wanted.dtype)
        untold = np.ones((len(columns), len(mine)), np.bool_)
        for start, i, first, count in layout.pieces:
            told = samples[i].routed_experts
            if told is not None:
                begin, end = np.searchsorted(mine, (start, start + max(0, min(count, len(told) - first))))
                rows = told[mine[begin:end] - start + first][:, columns].swapaxes(0, 1)
                experts[:, begin:end], untold[:, begin:end] = rows, rows[..., 0] < 0
        fills = int(np.searchsorted(mine, total - filling))
        in_turn = np.arange((len(mine) - fills) * wanted.top_k).reshape(-1, wanted.top_k)
        experts[:, fills:], untold[:, fills:] = in_turn % wanted.num_experts, False
        return RolloutRoutes(
            dict(zip(wanted.columns, torch.from_numpy(experts).to(self.device), strict=True)),
            dict(zip(wanted.columns, torch.from_numpy(untold).to(self.device), strict=True)) if untold.any() else {},
        )

    def _optional(self, values: Sequence[tuple[float, ...] | None]) -> Tensor | None:
        """Float32 [t]; None when a sample has none."""
        if any(value is None for value in values):
            return None
        return self._floats([x for value in values for x in value or ()])

    def _floats(self, values: list[float]) -> Tensor:
        return torch.from_numpy(np.array(values, np.float32)).to(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRoutes:
    """Which of the routes of a rollout this rank needs: those of its layers and, with sequence parallelism, of a part
    of the tokens."""

    columns: Mapping[int, int]  # the place in ``TrainSample.routed_experts``, by the number of the layer
    num_experts: int
    top_k: int
    part: int = 0
    parts: int = 1

    @property
    def dtype(self) -> type[np.uint8 | np.int16]:
        """The smallest that names every expert."""
        return np.uint8 if self.num_experts <= 1 << 8 else np.int16


class Piece(NamedTuple):
    """Tokens that lie in a pack as they do in a sample."""

    start: int  # in the pack
    sample: int
    first: int  # in the sample
    tokens: int


@dataclass(slots=True)
class _Layout:
    """A pack while it is put together."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    trees: list[Tree] = field(default_factory=list)
    predictors: dict[int, list[int]] = field(default_factory=dict)  # of each sample's response tokens
    pieces: list[Piece] = field(default_factory=list)

    def add(self, samples: Sequence[TrainSample], members: list[int]) -> None:
        """One segment: the prompt of all the members, then what is needed of each one's response."""
        prompt = _prompt(samples[members[0]])
        self.pieces.append(Piece(len(self.tokens), _most_told(samples, members), 0, len(prompt)))
        self._append(prompt, 0)
        last = len(self.tokens) - 1
        for i in members:
            start, response = len(self.tokens), _response(samples[i])
            self.pieces.append(Piece(start, i, len(prompt), len(response) - 1))
            self._append(response[:-1], len(prompt))
            self.predictors[i] = [last, *range(start, len(self.tokens))]
        lengths = [samples[i].response_length - 1 for i in members]
        self.trees.append((len(prompt), *lengths) if len(members) > 1 else (len(prompt) + lengths[0],))

    def fill(self, multiple: int) -> int:
        """Fills up to a multiple of that many tokens, and tells with how many."""
        missing = -len(self.tokens) % multiple
        if missing:
            self._append((0,) * missing, 0)
            self.trees.append((missing,))
        return missing

    def _append(self, tokens: tuple[int, ...], first_position: int) -> None:
        self.tokens += tokens
        self.positions += range(first_position, first_position + len(tokens))


def _integers(values: Sequence[int]) -> Tensor:
    """Int64; by NumPy, which reads a list in half the time."""
    return torch.from_numpy(np.array(values, np.int64))


def _most_told(samples: Sequence[TrainSample], members: list[int]) -> int:
    """The one of some samples with the same prompt that has the most routes for it, which the prompt follows."""

    def told(i: int) -> int:
        routes, sample = samples[i].routed_experts, samples[i]
        return 0 if routes is None else int((routes[: sample.total_length - sample.response_length, :, 0] >= 0).sum())

    return members[0] if len(members) == 1 else max(members, key=told)


def _prompt(sample: TrainSample) -> tuple[int, ...]:
    if sample.response_length >= sample.total_length:
        raise InvalidSample(f"sample {sample.index} (group {sample.group_index}) has no prompt token")
    return sample.tokens[: sample.total_length - sample.response_length]


def _response(sample: TrainSample) -> tuple[int, ...]:
    return sample.tokens[sample.total_length - sample.response_length :]
