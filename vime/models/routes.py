"""Which experts the tokens of a text were sent to, as engines tell it and samples keep it: compact arrays.

The routes of a text are integers [tokens, layers, top_k]: for each token from the first on, and for each layer with
experts, the experts that it was sent to. The engine never computes the last token that it samples, so there are routes
of at most all tokens but that. Where there is none the router of the trainer chooses; a negative number says the same
of a token in the middle.

Arrays are shared between samples and never changed in place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vime.models.shape import ModelShape
from vime.types import RoutedExperts, SamplingParams

__all__ = ["RouteShape", "joined", "unrouted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteShape:
    """What routes of one model must look like."""

    num_layers: int
    layers: tuple[int, ...]  # those with experts, from 0
    num_experts: int
    top_k: int

    @classmethod
    def of(cls, shape: ModelShape) -> RouteShape:
        assert shape.moe is not None, "there are routes only where there are experts"
        layers = tuple(layer for layer in range(shape.num_layers) if shape.has_experts(layer))
        return cls(num_layers=shape.num_layers, layers=layers, num_experts=shape.moe.num_experts, top_k=shape.moe.top_k)

    def checked(self, routes: Any, tokens: int) -> RoutedExperts:
        """The routes of layers with experts, as small as numbers can be: uint8, or int16 where that is too small.

        Args:
            routes: of a text of so many ``tokens``, perhaps also of layers without experts, as vLLM gives them.

        Raises:
            ValueError: they are nothing of the kind; the message goes on after "routes".
        """
        if not isinstance(routes, np.ndarray) or routes.dtype.kind not in "iu":
            of = f" of {routes.dtype}" if isinstance(routes, np.ndarray) else ""
            raise ValueError(f"must be a numpy array of integers, not {type(routes).__name__}{of}")
        right = len(routes.shape) == 3 and routes.shape[1] in (len(self.layers), self.num_layers)
        if not right or routes.shape[0] > tokens or routes.shape[2] != self.top_k:
            expected = f"[{tokens - 1}, {len(self.layers)}, {self.top_k}]"
            raise ValueError(f"have the shape {list(routes.shape)}; those of {tokens} tokens have {expected}")
        if routes.shape[1] != len(self.layers):
            routes = routes[:, list(self.layers)]
        lowest, highest = (int(routes.min()), int(routes.max())) if routes.size else (0, 0)
        if highest >= self.num_experts:
            raise ValueError(f"name expert {highest}; there are {self.num_experts}, from 0")
        if _repeats(routes):
            raise ValueError("send a token to the same expert twice")
        if lowest < 0:  # a router cannot choose some of the experts of a token
            routes = np.where((routes < 0).any(-1, keepdims=True), -1, routes)
        smallest = np.uint8 if lowest >= 0 and self.num_experts <= 1 << 8 else np.int16
        compact: RoutedExperts = routes.astype(smallest, copy=False)
        return compact


def _repeats(routes: RoutedExperts) -> bool:
    """Whether a token has an expert twice in a layer. Every place is compared with those so far behind it."""
    places = np.ascontiguousarray(np.moveaxis(routes, -1, 0))  # fifteen times as fast
    pairs = ((places[:-far], places[far:]) for far in range(1, len(places)))
    return any(bool(((one == other) & (one >= 0)).any()) for one, other in pairs)


def joined(known: RoutedExperts | None, added: RoutedExperts | None, tokens: int) -> RoutedExperts | None:
    """What is known of a text after an engine has told the routes of its last tokens.

    What was known stays: those routes were chosen when the tokens were sampled.

    Args:
        added: of all ``tokens`` but the last one, from some token on.
    """
    have = 0 if known is None else len(known)
    if added is None or tokens - 1 - len(added) > have:  # nothing, or something would be missing in between
        return known
    fresh = added[have - (tokens - 1 - len(added)) :]
    return fresh if known is None else np.concatenate([known, fresh])


def unrouted(params: SamplingParams, known: RoutedExperts | None) -> SamplingParams:
    """The same, but where routes are wanted, only those of tokens for which there are none yet."""
    if params.routed_experts_prompt_start is None or known is None:
        return params
    return replace(params, routed_experts_prompt_start=len(known))
