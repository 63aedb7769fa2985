"""Whether an engine still generates.

A server's own /health stays green while decoding is stuck, so the proof of health is a generated token. An engine that
has more requests than it takes at a time lets a new one wait, perhaps for minutes: then tokens of others count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from vime.models.routes import RouteShape
from vime.serving.client import parse_generation, request_body, with_routes
from vime.serving.control import EngineControl
from vime.serving.http import EngineError, Late
from vime.types import SamplingParams

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=1.0, seed=0, ignore_eos=True)
LOOKS = 10  # for the progress of others


async def check_generates(engine: EngineControl, timeout_s: float, *, routes: RouteShape | None = None) -> None:
    """Makes the engine generate one token. A paused engine would hold the request: do not ask it.

    Args:
        routes: what the routes look like that it must also tell of the prompt; None: it need not tell any.

    Raises:
        EngineError: it is unreachable, answers with an error, or tells no such routes; or within ``timeout_s`` there
            was no answer, and then, within another ``timeout_s``, no token for anybody.
    """
    start = None if routes is None else 0
    body = request_body([0], replace(ONE_TOKEN, routed_experts_prompt_start=start))
    try:
        answer = await engine.generate(body, timeout_s=timeout_s)
    except Late as late:
        if not await _others_progress(engine, timeout_s):
            raise EngineError(f"{late}, and generates nothing for others either") from None
        return
    try:
        generation = parse_generation(answer)
        if routes is not None:
            with_routes(generation, answer, body, routes)
    except EngineError as error:
        raise EngineError(f"{engine}: {error}") from None


async def _others_progress(engine: EngineControl, timeout_s: float) -> bool:
    seen: dict[int, Progress] = {}
    for _ in range(LOOKS):
        now = Progress.of(await engine.progress(timeout_s=timeout_s))
        if now.server in seen and now.is_ahead_of(seen[now.server]):
            return True
        seen.setdefault(now.server, now)
        await asyncio.sleep(timeout_s / LOOKS)
    return False


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What one API server of an engine knows of its requests; there may be several."""

    server: int  # its process
    finished: int  # since it was started
    running: Mapping[str, int]  # tokens of each so far

    @classmethod
    def of(cls, answer: Mapping[str, object]) -> Progress:
        return cls(**{name: answer[name] for name in cls.__dataclass_fields__})  # type: ignore[arg-type]

    def is_ahead_of(self, before: Progress) -> bool:
        grown = any(tokens > before.running.get(request, tokens) for request, tokens in self.running.items())
        return grown or self.finished > before.finished
