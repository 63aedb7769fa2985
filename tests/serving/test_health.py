"""When an engine counts as healthy, seen with one that answers as it is told to."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from vime.serving import answers
from vime.serving.health import check_generates
from vime.serving.http import EngineError, Late, Unreachable

TOKEN = orjson.loads(answers.encode([5], [-1.0], [{"version": "1", "start": 0, "end": 1}], "length"))


class Engine:
    """``progress``: what each look finds, the last one for ever."""

    def __init__(self, *progress: dict[str, Any], answers_probe: bool = False) -> None:
        self._progress, self._answers = list(progress), answers_probe
        self.looks = 0

    async def generate(self, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        assert body["sampling_params"]["max_tokens"] == 1
        if self._answers:
            return TOKEN
        await asyncio.sleep(timeout_s)
        raise Late(f"engine 0 did not answer within {timeout_s:g} s")

    async def progress(self, *, timeout_s: float) -> dict[str, Any]:
        self.looks += 1
        return self._progress.pop(0) if len(self._progress) > 1 else self._progress[0]


def look(server: int = 1, finished: int = 0, **running: int) -> dict[str, Any]:
    return {"server": server, "finished": finished, "running": running}


async def check(engine: Engine) -> None:
    await check_generates(engine, timeout_s=0.05)  # type: ignore[arg-type]


async def test_a_token_is_enough() -> None:
    engine = Engine(answers_probe=True)
    await check(engine)
    assert engine.looks == 0


@pytest.mark.parametrize(
    "progress",
    [
        [look(a=3, b=7), look(a=3, b=7), look(a=3, b=8)],
        [look(a=3), look(finished=1)],
        [look(1, a=3), look(2, z=1), look(1, a=4)],
    ],
    ids=["a request grows", "a request ends", "one of two API servers"],
)
async def test_an_engine_that_is_too_busy_for_the_probe_is_healthy_as_long_as_others_get_tokens(
    progress: list[dict[str, Any]],
) -> None:
    await check(Engine(*progress))


@pytest.mark.parametrize(
    "progress",
    [
        [look(a=3, probe=0)],
        [look(a=3), look(a=3, new=0), look(new=0)],
        [look(1, a=3), look(2, a=4)],
    ],
    ids=["nothing moves", "others come and are aborted", "two servers that stand still"],
)
async def test_an_engine_that_gives_nobody_a_token_is_stuck(progress: list[dict[str, Any]]) -> None:
    with pytest.raises(EngineError, match=r"did not answer .* and generates nothing for others either"):
        await check(Engine(*progress))


async def test_an_engine_that_is_gone_is_not_asked_for_its_progress() -> None:
    class Gone(Engine):
        async def generate(self, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
            raise Unreachable("engine 0 cannot be reached")

    with pytest.raises(Unreachable):
        await check(Gone(look()))
