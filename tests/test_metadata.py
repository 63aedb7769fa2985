"""What metadata may be: JSON's values, of bounded depth and size."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from vime import metadata
from vime.metadata import BadMetadata, checked, multi_turn_of, without_bad


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def test_numbers_that_are_not_finite_become_null_and_others_plain() -> None:
    given = {"loss": math.nan, "x": [math.inf, 1.5], "n": np.float32(0.5), "a": np.arange(2), "t": (1, "2"), "b": True}
    found = checked(given)
    assert found == {"loss": None, "x": [None, 1.5], "n": 0.5, "a": [0, 1], "t": [1, "2"], "b": True}
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({(1, 2): 3}, "metadata has '(1, 2)' (tuple) as a key; keys must be texts"),
        ({"a": {1: 3}}, "metadata['a'] has '1' (int) as a key; keys must be texts"),
        ({"n": 10**5000}, "metadata['n'] is an integer of 16610 bits; it must have at most 4096"),
        ({"f": [open]}, "metadata['f'][0] is of type builtin_function_or_method; it must be what JSON can hold"),
        (nested(900), "metadata['a']['a']['a']['a']['a']… is nested more than 100 deep, or holds itself"),
        ([1], "metadata is of type list; it must be a dict"),
        ({"multi_turn": True}, "metadata['multi_turn'] is vime's own"),
        ({"multi_turn": {"turns": 3}}, "metadata['multi_turn'] is vime's own"),
    ],
)
def test_what_cannot_be_kept_is_named_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(BadMetadata) as caught:
        checked(value)
    assert str(caught.value).startswith(message)


def test_a_value_that_holds_itself_and_one_that_is_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    circular: dict[str, Any] = {}
    circular["me"] = [circular, circular]
    with pytest.raises(BadMetadata, match="holds itself"):
        checked(circular)
    monkeypatch.setattr(metadata, "MAX_CHARS", 1 << 20)
    many: list[Any] = []
    for _ in range(50):
        many = [many, many]  # 2^50 values, of which few are held
    with pytest.raises(BadMetadata, match="larger than 1 MiB"):
        checked({"text": "x" * (2 << 20)})
    with pytest.raises(BadMetadata, match="larger than 1 MiB"):
        checked({"many": many})


def test_what_can_be_kept_of_bad_metadata_is_kept() -> None:
    assert without_bad({"a": 1, 2: 3, "c": {4}, "d": [math.nan]}) == {"a": 1, "d": [None]}


def test_a_record_of_turns_is_one_only_where_it_looks_like_one() -> None:
    record = {"turns": [[0, 3], [5, 8]], "answer": "x", "tool_calls": 2}
    assert multi_turn_of({"multi_turn": record}) is record
    for other in (True, "yes", {"turns": True}, {"answer": 3}, None):
        assert multi_turn_of({"multi_turn": other}) == {}
