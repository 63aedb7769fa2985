"""Routes of experts: their shape, and how they grow with a text."""

from __future__ import annotations

import numpy as np
import pytest

from vime.models.routes import RouteShape, joined, unrouted
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
        (routes(6), r"have the shape \[6, 2, 2\]; those of 5 tokens have \[4, 2, 2\]"),
        (routes(4)[:, :, 0], r"have the shape \[4, 2\]"),
        (np.repeat(routes(4), 2, axis=1), r"have the shape \[4, 4, 2\]"),
        (routes(4) + 7, "name expert 14; there are 8, from 0"),
        (routes(4) // 8, "send a token to the same expert twice"),
    ],
)
def test_what_is_no_route_is_refused_with_its_reason(wrong: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SHAPE.checked(wrong, 5)


def test_an_engine_adds_the_routes_of_what_it_was_not_asked_before() -> None:
    """Of 6 tokens, then of 9: whatever it tells again of the first ones is not taken."""
    known = joined(None, routes(5), 6)
    for start in (0, 3, 5):
        found = joined(known, routes(8 - start, first=start + 1), 9)
        assert found is not None
        assert found.tolist() == [*routes(5).tolist(), *routes(3, first=6).tolist()]
    assert joined(known, None, 9) is known
    assert joined(known, routes(2), 9) is known, "those of a token in between are missing"


def test_engines_are_asked_for_what_is_not_known() -> None:
    wanted = SamplingParams(max_tokens=1, routed_experts_prompt_start=0)
    assert unrouted(wanted, None) is wanted
    assert unrouted(wanted, routes(5)).routed_experts_prompt_start == 5
    unwanted = SamplingParams(max_tokens=1)
    assert unrouted(unwanted, routes(5)) is unwanted
