"""Routes of mixture-of-experts models: which experts each token was sent to, kept to be followed again.

The expert that a token goes to is a choice between scores, and scores that nearly tie come out differently when they
are computed another way. Then the policy that is trained is not the one that sampled, or not the one whose log-probs
were taken. So routes are chosen once and followed from then on. With --use-routing-replay the pass that takes the
log-probs chooses them (R2), with --use-rollout-routing-replay the engines have chosen them while they sampled (R3).
Only the choice is repeated: the weights of the chosen experts are computed anew, and get their gradients.

An engine does not tell the routes of every token. Of the others the router chooses in the first pass, and all later
ones follow that choice too. Where the weights move before a micro-batch is trained, its first pass is one that takes
log-probs, before they do.

Routes belong to one micro-batch on one rank. They travel with it (``Segments.routes``), so that several micro-batches
may be under way in a pipeline, and a layer that is recomputed in the backward pass follows the routes of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vime.training.packing import MicroBatch

__all__ = ["LayerRoutes", "RolloutRoutes", "Routes", "follow", "recorded"]

TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class RolloutRoutes:
    """What engines told of the tokens of one micro-batch on this rank, by the number of the layer."""

    experts: Mapping[int, Tensor]  # uint8, or int16 from 257 experts on: [T, top_k]
    untold: Mapping[int, Tensor] = field(default_factory=dict)  # bool [T], where experts mean nothing; empty: nowhere

    @property
    def complete(self) -> bool:
        """Whether every token has a route in every layer."""
        return not self.untold


@dataclass(slots=True)
class Routes:
    """The experts of each token of one micro-batch on this rank, by the number of the layer."""

    experts: dict[int, Tensor] = field(default_factory=dict)  # as small as those of ``RolloutRoutes``
    recording: bool = False  # what is known already is chosen anew
    told: RolloutRoutes | None = None  # followed where nothing was recorded, and what is recorded follows it

    def at(self, layer: int) -> LayerRoutes:
        return LayerRoutes(self, layer)

    def knows(self, layer: int) -> bool:
        return layer in self.experts or (self.told is not None and layer in self.told.experts)


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
        experts, untold = self._known()
        if experts is None or untold is not None:
            _, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
            experts = own if experts is None or untold is None else torch.where(untold[:, None], own, experts)
            self.routes.experts[self.layer] = experts.to(torch.uint8 if scores.shape[1] <= 1 << 8 else torch.int16)
        assert experts.shape == (len(scores), topk), (self.layer, scores.shape, topk)
        return scores.gather(1, experts), experts

    def _known(self) -> tuple[Tensor | None, Tensor | None]:
        """int64 [T, top_k]; and bool [T], the tokens of which that does not hold, where there are such."""
        routes, told = self.routes, self.routes.told
        if not routes.recording and (told is None or self.layer in routes.experts):
            return routes.experts[self.layer].long(), None
        if told is None:
            return None, None
        return told.experts[self.layer].long(), told.untold.get(self.layer)


def follow(batches: Sequence[MicroBatch]) -> None:
    """From now on these micro-batches are computed along the routes that engines told.

    Where those have gaps, the first pass fills them.
    """
    for batch in batches:
        batch.segments.routes = Routes(told=batch.rollout_routes)


@contextmanager
def recorded(batches: Sequence[MicroBatch]) -> Iterator[None]:
    """What is computed of these micro-batches in the block chooses the routes that all later passes follow.

    It follows those that engines told itself.
    """
    found = [Routes(recording=True, told=batch.rollout_routes) for batch in batches]
    for batch, routes in zip(batches, found, strict=True):
        batch.segments.routes = routes
    yield
    for routes in found:
        routes.recording = False
