"""Tokens to experts of the same rank and back."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from vime.training.layers.lean import cheap

__all__ = ["LocalDispatcher"]


class LocalDispatcher(MoETokenDispatcher):  # type: ignore[misc]
    """What Megatron's dispatchers do where nothing travels, by kernels and without a wait for the device.

    The sum over the experts of a token is taken in float32 and in a fixed order; Megatron adds them to the output one
    by one, in its type and in any order. Nothing is dropped: every token goes to all of its experts.
    """

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """[L, 1, H], bool [N, E], [N, E] → rows sorted by expert [R, H], [R]."""
        from vime.training.kernels.permute import places_of, spread

        self._shape = hidden_states.shape
        tokens = hidden_states.view(-1, self._shape[-1])
        pairs, rows = places_of(routing_map, self.config.moe_router_topk)
        sources = pairs // routing_map.shape[1]
        self._places, self._counts = (sources, rows), routing_map.sum(0)
        spread_tokens, kept = spread(tokens, sources, rows), tokens.detach()
        if self.config.recompute_granularity != "full":
            cheap(spread_tokens, lambda: spread(kept, sources, rows))
        return spread_tokens, probs.flatten().gather(0, pairs)

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

    @staticmethod
    def fits(config: Any, dispatcher: MoETokenDispatcher) -> bool:
        """Whether it may stand in for Megatron's ``dispatcher``."""
        alone = dispatcher.ep_size == dispatcher.tp_size == 1
        return alone and config.moe_expert_capacity_factor is None and dispatcher.shared_experts is None
