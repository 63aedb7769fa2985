"""Tokens to the rows of their experts and back, by kernels.

Megatron's dispatchers sort tokens by masked selection, which waits for the device, cut them into a piece for each
expert and rank, and add the experts' outputs to a token one by one, in its type and in any order. Here rows are copied
by number, and the sum over the experts of a token is taken in float32, in a fixed order. No token is dropped.

Shapes: N tokens of this rank, E experts, R rows, H channels.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoETokenDispatcher
from torch import Tensor

from vime.training.layers.lean import cheap

__all__ = ["LocalDispatcher", "TravelDispatcher", "dispatcher"]

Permutation = tuple[Tensor, Tensor]
"""The token of each row, int64 [R], and the rows of each token, int32 [N, K]."""


def dispatcher(config: Any, megatrons: MoETokenDispatcher, **places: Any) -> MoETokenDispatcher:
    """What stands in for the dispatcher that Megatron made.

    That one itself stays where tokens may be dropped, and where shared experts are computed while tokens travel.

    Args:
        places: what Megatron's dispatchers are built with besides.
    """
    if config.moe_expert_capacity_factor is not None or megatrons.shared_experts is not None:
        return megatrons
    if megatrons.ep_size == megatrons.tp_size == 1:
        return LocalDispatcher(config, places["pg_collection"])
    return TravelDispatcher(config=config, **places)


def _spread(
    config: Any, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
) -> tuple[Tensor, Tensor, Permutation]:
    """[L, 1, H], bool [N, E], [N, E] → rows sorted by expert [R, H], [R], and where they are from."""
    from vime.training.kernels.permute import places_of, spread

    tokens = hidden_states.view(-1, hidden_states.shape[-1])
    pairs, rows = places_of(routing_map, config.moe_router_topk)
    sources = pairs // routing_map.shape[1]
    kept = tokens.detach()
    there = cheap(spread(tokens, sources, rows), lambda: spread(kept, sources, rows))
    return there, probs.flatten().gather(0, pairs), (sources, rows)


class LocalDispatcher(MoETokenDispatcher):  # type: ignore[misc]
    """Where experts are neither spread over ranks nor cut, nothing travels, and nothing waits for the device."""

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """[L, 1, H], bool [N, E], [N, E] → rows sorted by expert [R, H], [R]."""
        self._shape, self._counts = hidden_states.shape, routing_map.sum(0)
        rows, row_probs, self._places = _spread(self.config, hidden_states, routing_map, probs)
        return rows, row_probs

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """→ rows, int64 [E] on the device, probabilities of the rows."""
        return hidden_states, self._counts, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """[R, H] → [L, 1, H]."""
        from vime.training.kernels.permute import collect

        return collect(hidden_states, *self._places).view(self._shape)


class TravelDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """Megatron's all-to-all; the host waits once a pass, to know how many rows travel."""

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """[L, 1, H], bool [N, E], [N, E] → rows sorted by expert [R, H], [R]."""
        self.hidden_shape, self._type = hidden_states.shape, probs.dtype
        self._counts = self.preprocess(routing_map)
        self._by_rank = self._counts[None] if self.num_local_experts == 1 else self.num_global_tokens_per_local_expert
        self._maybe_dtoh_and_synchronize("before_permutation_1")  # sends sizes to the host, which waits for them later
        rows, row_probs, self._places = _spread(self.config, hidden_states, routing_map, probs)
        return rows, row_probs

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sends rows to the ranks of their experts."""
        self._maybe_dtoh_and_synchronize("before_ep_alltoall")
        known = sum(int(each) for each in self.input_splits)  # fewer where a token has an expert twice
        self.tokens_per_expert = None
        rows, row_probs = super().token_dispatch(hidden_states[:known], probs[:known])
        return rows, row_probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows that came from several ranks, those of each rank sorted by expert → sorted by expert; int64 [E] on the
        device, where E are the experts of this rank; probabilities of the rows.
        """
        from vime.training.kernels.permute import spread

        if self.tp_size > 1:
            splits = self.output_splits_tp.tolist()
            hidden_states, probs = (
                gather_from_sequence_parallel_region(each, group=self.tp_group, output_split_sizes=splits)
                for each in (hidden_states, probs)
            )
        self._sorted = _sorted_by_expert(self._by_rank, len(hidden_states))
        sources = self._sorted[0]
        return spread(hidden_states, *self._sorted), self._counts, probs.gather(0, sources)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Undoes it."""
        from vime.training.kernels.permute import collect

        rows = collect(hidden_states, *self._sorted)
        if self.tp_size > 1:
            rows = reduce_scatter_to_sequence_parallel_region(
                rows.to(self._type), group=self.tp_group, input_split_sizes=self.output_splits_tp.tolist()
            ).to(rows.dtype)
        return rows

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """[R, H] → [L, 1, H]."""
        from vime.training.kernels.permute import collect

        sources, rows = self._places
        return collect(hidden_states, sources[: len(hidden_states)], rows).view(self.hidden_shape)


def _sorted_by_expert(counts: Tensor, rows: int) -> Permutation:
    """Where the rows of the same experts lie that several ranks sent.

    Args:
        counts: int64 [ranks, E], on the device: rows that each rank sent for each expert.
        rows: their sum.
    """
    ends = counts.flatten().cumsum(0)
    first = (ends - counts.flatten()).view_as(counts).t().flatten()
    sizes = counts.t().flatten()
    sorted_ends = sizes.cumsum(0)
    number = torch.arange(rows, device=counts.device)
    piece = torch.searchsorted(sorted_ends, number, right=True)
    sources = first[piece] + number - (sorted_ends - sizes)[piece]
    places = torch.empty_like(sources).scatter_(0, sources, number)
    return sources, places.int()[:, None]
