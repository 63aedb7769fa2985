"""Which experts the tokens of a text were sent to, as engines tell it and samples keep it: compact arrays.

The routes of a text are integers [tokens, layers, top_k]: for each token from the first on, and for each layer with
experts, the experts that it was sent to. The engine never computes the last token that it samples, so there are routes
of at most all tokens but that. Where there is none the router of the trainer chooses; a negative number says the same
of a token in the middle.

Arrays are shared between samples and never changed in place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from vime.models.shape import ModelShape
from vime.types import RoutedExperts, SamplingParams

__all__ = ["Pieces", "RouteShape", "grown", "known_tokens", "pieces_of", "unrouted", "whole"]

Pieces: TypeAlias = tuple[RoutedExperts, ...]
"""Routes of the first tokens of a text that grows, each piece behind the one before: to join them whenever one is
added would copy a dialogue of many turns over and over."""


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
        _require_array(routes)
        count, layers, top_k = routes.shape
        if count > tokens - 1 or layers not in (len(self.layers), self.num_layers) or top_k != self.top_k:
            expected = f"[{tokens - 1}, {len(self.layers)}, {self.top_k}]"
            raise ValueError(f"have the shape {list(routes.shape)}; those of {tokens} tokens have at most {expected}")
        if routes.shape[1] != len(self.layers):
            routes = routes[:, list(self.layers)]
        lowest, highest = (int(routes.min()), int(routes.max())) if routes.size else (0, 0)
        if highest >= self.num_experts:
            raise ValueError(f"name expert {highest}; there are {self.num_experts}, from 0")
        if _repeats(routes, some_unknown=lowest < 0):
            raise ValueError("send a token to the same expert twice")
        if lowest < 0:  # a router cannot choose some of the experts of a token
            routes = np.where((routes < 0).any(-1, keepdims=True), -1, routes)
        smallest = np.uint8 if lowest >= 0 and self.num_experts <= 1 << 8 else np.int16
        compact: RoutedExperts = routes.astype(smallest, copy=False)
        return compact


def _repeats(routes: RoutedExperts, *, some_unknown: bool) -> bool:
    """Whether a token has an expert twice in a layer. Every place is compared with those so far behind it."""
    places = np.ascontiguousarray(np.moveaxis(routes, -1, 0))  # fifteen times as fast
    for far in range(1, len(places)):
        same = places[:-far] == places[far:]
        if some_unknown:
            same &= places[far:] >= 0
        if same.any():
            return True
    return False


def pieces_of(routes: Any, tokens: int) -> Pieces:
    """The routes of the first of so many ``tokens``, of which more may be told.

    Raises:
        ValueError: they cannot be; the message goes on after "routes".
    """
    if routes is None:
        return ()
    _require_array(routes)
    if len(routes) > tokens - 1:
        raise ValueError(
            f"are those of {len(routes)} tokens, and of {tokens} tokens at most {tokens - 1} have one, because the "
            "last one was never computed; whoever takes tokens away takes their routes away too: Sample.cut does"
        )
    return (routes,)


def grown(known: Pieces, told: Any, tokens: int) -> Pieces:
    """What is known of a text after an engine has told the routes of its last tokens.

    What was known stays: those routes were chosen when the tokens were sampled.

    Args:
        told: of all ``tokens`` but the last one, from some token on.

    Raises:
        ValueError: they cannot be, or are of other layers than those that are known; the message goes on after
            "routes".
    """
    if told is None:
        return known
    _require_array(told)
    start, have = tokens - 1 - len(told), known_tokens(known)
    if start < 0:
        raise ValueError(f"are those of {len(told)} tokens, and only the first {tokens - 1} of {tokens} were computed")
    if start > have:  # something would be missing in between
        return known
    if known and known[0].shape[1:] != told.shape[1:]:
        raise ValueError(
            f"have {list(told.shape[1:])} layers and experts a token, and those of the tokens before "
            f"{list(known[0].shape[1:])}: all of a sample are with layers without experts, or all without"
        )
    return (*known, told[have - start :])


def known_tokens(known: Pieces) -> int:
    """Of how many of the first tokens there are routes."""
    return sum(map(len, known))


def whole(known: Pieces) -> RoutedExperts | None:
    """All in one array."""
    if len(known) > 1:
        return np.concatenate(known)
    return known[0] if known else None


def unrouted(params: SamplingParams, known: Pieces) -> SamplingParams:
    """The same, but where routes are wanted, only those of tokens for which there are none yet."""
    if params.routed_experts_prompt_start is None or not known:
        return params
    return replace(params, routed_experts_prompt_start=known_tokens(known))


def _require_array(routes: Any) -> None:
    if not isinstance(routes, np.ndarray) or routes.dtype.kind not in "iu":
        of = f" of {routes.dtype}" if isinstance(routes, np.ndarray) else ""
        raise ValueError(f"must be a numpy array of integers, not {type(routes).__name__}{of}")
    if routes.ndim != 3:
        raise ValueError(f"have the shape {list(routes.shape)}; they must be [tokens, layers, top_k]")
