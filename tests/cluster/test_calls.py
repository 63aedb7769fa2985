"""Calls to Ray that fail say in one line what was waited for. Ray's answer is a fake."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, OutOfMemoryError

from vime.cluster import calls
from vime.cluster.calls import RemoteError, get_all


def answer_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(calls.ray, "get", get)


def test_a_call_without_an_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(GetTimeoutError("Get timed out: some object(s) not ready."), monkeypatch)
    with pytest.raises(RemoteError, match=r"^asking for the GPUs: no answer within 60 s$"):
        get_all([], what="asking for the GPUs", timeout_s=60)


def test_a_call_that_ray_ends_says_what_it_was_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(OutOfMemoryError("the node is full"), monkeypatch)
    with pytest.raises(RemoteError, match=r"^asking for the GPUs: OutOfMemoryError: "):
        get_all([], what="asking for the GPUs", timeout_s=60)
