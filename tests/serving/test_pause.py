"""What our route for pauses tells the engine, and whoever asked; that engines do pause is in test_generation.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vime.serving.compact import pause


class Engine:
    """Stands in for vLLM's client of its engine core: notes what it is asked, and fails if it is told to."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.failure = failure
        self.renderer = self.engine_core = self

    async def clear_mm_cache_async(self) -> None:
        self.asked.append(("clear_mm_cache", None))

    async def pause_scheduler_async(self, **how: Any) -> None:
        self.asked.append(("pause_scheduler", how))
        if self.failure is not None:
            raise self.failure

    async def pause_generation(self, **how: Any) -> None:
        await self.pause_scheduler_async(**how)


def request_to(engine: Engine) -> Any:
    return SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(engine_client=engine)))


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@pytest.mark.parametrize("clear_cache", [True, False])
async def test_caches_are_cleared_unless_the_query_says_not_to(mode: Any, clear_cache: bool) -> None:
    engine = Engine()
    await pause(request_to(engine), mode, clear_cache)
    cleared = [("clear_mm_cache", None)] if mode == "keep" and clear_cache else []  # else pause_generation does it
    assert engine.asked == [*cleared, ("pause_scheduler", {"mode": mode, "clear_cache": clear_cache})]


@pytest.mark.parametrize("mode", ["keep", "wait"])
@pytest.mark.parametrize(
    ("failure", "status", "body"),
    [
        (ValueError("not now"), 400, b'{"error":"not now"}'),
        (RuntimeError("it is gone"), 500, b'{"error":"Failed to pause generation: it is gone"}'),
    ],
)
async def test_a_failure_is_told_as_vllm_tells_it(mode: Any, failure: Exception, status: int, body: bytes) -> None:
    answer = await pause(request_to(Engine(failure)), mode)
    assert (answer.status_code, answer.body) == (status, body)
