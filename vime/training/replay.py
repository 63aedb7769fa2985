"""Routes of mixture-of-experts models: which experts each token was sent to, kept to be followed again.

The expert that a token goes to is a choice between scores, and scores that nearly tie come out differently when they
are computed another way. Then the policy that is trained is not the one whose log-probs were taken. So the pass that
takes the log-probs records the routes, and the training pass follows them (R2). Only the choice is repeated: the
weights of the chosen experts are computed anew, and get their gradients.

Routes belong to one micro-batch on one rank. They travel with it (``Segments.routes``), so that several micro-batches
may be under way in a pipeline, and a layer that is recomputed in the backward pass follows the routes of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from vime.training.packing import MicroBatch

__all__ = ["LayerRoutes", "Routes", "recorded"]

TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass(slots=True)
class Routes:
    """The experts of each token of one micro-batch on this rank, by the number of the layer."""

    experts: dict[int, Tensor] = field(default_factory=dict)  # int16 [T, top_k]; int64 would be four times as much
    recording: bool = False

    def at(self, layer: int) -> LayerRoutes:
        return LayerRoutes(self, layer)


@dataclass(frozen=True, slots=True)
class LayerRoutes:
    """The routes of one layer, with the method that Megatron's router calls in place of its own choice."""

    routes: Routes
    layer: int

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: TopK
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers of the experts that each token goes to, both [T, top_k]; ``scores`` is [T, experts].

        Raises:
            KeyError: the layer was not recorded.
        """
        if self.routes.recording:
            found, experts = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
            self.routes.experts[self.layer] = experts.short()
            return found, experts
        experts = self.routes.experts[self.layer].long()
        assert experts.shape == (len(scores), topk), (experts.shape, scores.shape, topk)
        return scores.gather(1, experts), experts


@contextmanager
def recorded(batches: Sequence[MicroBatch]) -> Iterator[None]:
    """What is computed of these micro-batches in the block chooses the routes that all later passes follow."""
    found = [Routes(recording=True) for _ in batches]
    for batch, routes in zip(batches, found, strict=True):
        batch.segments.routes = routes
    yield
    for routes in found:
        routes.recording = False
