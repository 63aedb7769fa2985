"""The loss of the draft layer, beside whatever else a model learns.

It is the negative log-probability of the same tokens with the same weights as in the other loss: those of the loss
mask, by samples or by tokens. As nothing but the draft layer learns of it, the two are trained apart in one pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from vime.algorithms import reduce
from vime.training.loss import Partial, not_finite
from vime.training.model import draft_of
from vime.training.packing import MicroBatch
from vime.training.step import Objective, gather_parameters
from vime.training.weights_io import unwrap

__all__ = ["DraftObjective", "embedding_lent"]

G = TypeVar("G")


@dataclass(frozen=True, slots=True)
class DraftObjective(Generic[G]):
    """Another objective, implements ``step.Objective``, with the draft layer's loss added."""

    objective: Objective[G]
    coef: float

    @property
    def per_token(self) -> bool:
        return self.objective.per_token

    def forward(self, chunk: Any, batch: MicroBatch) -> Tensor:
        """The model asks its draft layer by itself, wherever gradients are wanted."""
        return self.objective.forward(chunk, batch)

    def loss(self, output: Tensor, batch: MicroBatch, given: G, mean: reduce.Reduction) -> tuple[Tensor, Partial]:
        value, partial = self.objective.loss(output, batch, given, mean)
        losses_t = -draft_of(output)
        draft, suspects_n = mean(losses_t), not_finite(losses_t.detach(), batch)
        if partial.suspects_n is not None:
            suspects_n |= partial.suspects_n
        sums = partial.sums | {"train/mtp_loss": draft.detach()}
        return value + self.coef * draft, dataclasses.replace(partial, sums=sums, suspects_n=suspects_n)


@contextmanager
def embedding_lent(chunks: Sequence[Any]) -> Iterator[None]:
    """Lends the draft layer the embedding of the first pipeline stage, where it is on another one. Collective.

    A tied embedding is there anyway, as the output layer.
    """
    first, last = unwrap(chunks[0]), unwrap(chunks[-1])
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if stages == 1 or first.share_embeddings_and_output_weights:
        yield
        return
    gather_parameters(chunks)
    if parallel_state.is_rank_in_embedding_group():
        group, lends = parallel_state.get_embedding_group(), first.pre_process
        rows = first.embedding.word_embeddings.weight.detach() if lends else torch.empty_like(last.output_layer.weight)
        dist.broadcast(rows.detach(), src=dist.get_global_rank(group, 0), group=group)
        last.lent_embedding = None if lends else rows.detach()
    yield
    last.lent_embedding = None
