"""Whether an engine still generates.

A server's own /health stays green while decoding is stuck, so the proof of health is one generated token.
"""

from __future__ import annotations

from vime.serving.client import parse_generation, request_body
from vime.serving.control import EngineControl
from vime.types import SamplingParams

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=1.0, seed=0, ignore_eos=True)


async def check_generates(engine: EngineControl, *, timeout_s: float) -> None:
    """Makes the engine generate one token. A paused engine would hold the request: do not ask it.

    Raises:
        EngineError: it is unreachable, answers with an error, or does not answer within ``timeout_s``.
    """
    parse_generation(await engine.generate(request_body([0], ONE_TOKEN), timeout_s=timeout_s))
