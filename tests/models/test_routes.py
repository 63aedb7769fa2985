"""Routes of experts: their shape, and how they grow with a text."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from vime.models.routes import RouteShape, grown, pieces_of, unrouted, whole
from vime.types import SamplingParams

SHAPE = RouteShape(num_layers=3, layers=(1, 2), num_experts=8, top_k=2)


def routes(tokens: int, first: int = 0) -> np.ndarray:
    """[tokens, 2, 2], other ones for every token."""
    numbers = np.arange(first, first + tokens)[:, None, None] + np.arange(2)[:, None]
    return ((numbers + np.array([0, 4])) % 8).astype(np.uint8)


def test_routes_are_as_small_as_they_can_be() -> None:
    assert SHAPE.checked(routes(4).astype(np.int64), 5).dtype == np.uint8
    many = RouteShape(num_layers=3, layers=(1, 2), num_experts=512, top_k=2)
    assert many.checked(routes(4).astype(np.uint16) + 300, 5).dtype == np.int16
    assert SHAPE.checked(routes(0), 1).shape == (0, 2, 2)


def test_layers_without_experts_are_left_out() -> None:
    all_layers = np.concatenate([np.zeros((4, 1, 2), np.uint8), routes(4)], axis=1)
    assert np.array_equal(SHAPE.checked(all_layers, 5), routes(4))


def test_a_token_has_a_whole_route_or_none() -> None:
    partly = routes(3).astype(np.int32)
    partly[1, 0] = [-1, 5]
    partly[2] = -1
    found = SHAPE.checked(partly, 4)
    assert found.dtype == np.int16
    assert found.tolist() == [[[0, 4], [1, 5]], [[-1, -1], [2, 6]], [[-1, -1], [-1, -1]]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([[[0, 1]]], "must be a numpy array of integers, not list"),
        (routes(4) / 2, "must be a numpy array of integers, not ndarray of float64"),
        (routes(5), r"have the shape \[5, 2, 2\]; those of 5 tokens have at most \[4, 2, 2\]"),
        (routes(6), r"have the shape \[6, 2, 2\]; those of 5 tokens have at most \[4, 2, 2\]"),
        (routes(4)[:, :, 0], r"have the shape \[4, 2\]"),
        (np.repeat(routes(4), 2, axis=1), r"have the shape \[4, 4, 2\]"),
        (routes(4) + 7, "name expert 14; there are 8, from 0"),
        (routes(4) // 8, "send a token to the same expert twice"),
        (np.array([[[-1, -1], [5, 5]]]), "send a token to the same expert twice"),
    ],
)
def test_what_is_no_route_is_refused_with_its_reason(wrong: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SHAPE.checked(wrong, 5)


def test_an_engine_adds_the_routes_of_what_it_was_not_asked_before() -> None:
    """Of 6 tokens, then of 9: whatever it tells again of the first ones is not taken."""
    known = grown((), routes(5), 6)
    for start in (0, 3, 5):
        found = whole(grown(known, routes(8 - start, first=start + 1), 9))
        assert found is not None
        assert found.tolist() == [*routes(5).tolist(), *routes(3, first=6).tolist()]
    assert grown(known, None, 9) is known
    assert grown(known, routes(2), 9) is known, "those of a token in between are missing"
    assert whole(grown((), None, 9)) is None


def test_routes_that_grow_are_not_copied() -> None:
    """1,000 turns of one token each: pieces of what the engine told, joined once."""
    told = [routes(1, first=i) for i in range(1000)]
    known = functools.reduce(lambda known, i: grown(known, told[i], i + 2), range(1000), ())
    assert all(np.shares_memory(piece, array) for piece, array in zip(known, told, strict=True))
    assert np.array_equal(whole(known), routes(1000))


@pytest.mark.parametrize(
    ("known", "told", "message"),
    [
        (5, routes(3), r"are those of 5 tokens, and of 5 tokens at most 4 have one, .*: Sample.cut does"),
        (4, routes(7), "are those of 7 tokens, and only the first 6 of 7 were computed"),
        (4, np.repeat(routes(2), 2, axis=1), r"have \[4, 2\] layers and experts a token, and those .* before \[2, 2\]"),
        (4, routes(2).tolist(), "must be a numpy array of integers, not list"),
        (4, routes(2)[0], r"have the shape \[2, 2\]; they must be \[tokens, layers, top_k\]"),
    ],
)
def test_routes_that_are_not_those_of_the_tokens_are_refused(known: int, told: Any, message: str) -> None:
    """A text of 5 tokens, to which an engine has added 2."""
    with pytest.raises(ValueError, match=message):
        grown(pieces_of(routes(known), 5), told, 7)


def test_engines_are_asked_for_what_is_not_known() -> None:
    wanted = SamplingParams(max_tokens=1, routed_experts_prompt_start=0)
    assert unrouted(wanted, ()) is wanted
    assert unrouted(wanted, (routes(3), routes(2))).routed_experts_prompt_start == 5
    unwanted = SamplingParams(max_tokens=1)
    assert unrouted(unwanted, (routes(5),)) is unwanted
