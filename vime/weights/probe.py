"""Compares an engine with the trainer by what both say of the same tokens.

Each engine proves at every update that its matrices hold what was sent (``serving.transfer``). This probe does not rely
on that, and goes from end to end: it also notices a model that computes something else with the right weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from vime.serving.client import parse_generation, request_body
from vime.serving.control import EngineControl
from vime.serving.http import EngineError
from vime.types import SamplingParams, mean

TOKENS = 16
TIMEOUT_S = 120.0

LogProbsOf = Callable[[list[int], int], Awaitable[list[float]]]
"""(token ids, length of the prompt) → the trainer's log-prob of each token after the prompt, in nats."""


class ProbeFailed(EngineError):
    """An engine and the trainer disagree about the log-probs of the same tokens."""


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """The largest over the engines, in nats."""

    mean_difference: float
    max_difference: float


async def probe(
    engines: Sequence[EngineControl],
    log_probs_of: LogProbsOf,
    prompt: Sequence[int],
    *,
    tolerance: float,
    temperature: float = 1.0,
    timeout_s: float = TIMEOUT_S,
) -> ProbeReport:
    """Every engine samples a few tokens, and the trainer is asked for their log-probs.

    Args:
        prompt: token ids of something that the model may be asked. Rounding grows with the size of the logits, and
            after a text that makes no sense it can reach half a nat a token.
        tolerance: largest mean absolute difference, in nats. Rounding gives 1e-6 in float32 and 0.03 (trained models)
            to 0.15 (random ones) in bfloat16; wrong weights give 1 and more.
        temperature: the one by which ``log_probs_of`` divides the logits.

    Raises:
        ProbeFailed: an engine differs by more; the message has the numbers.
        EngineError: an engine does not answer.
    """
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=0)
    body = request_body(prompt, params)
    answers = await asyncio.gather(*(engine.generate(body, timeout_s=timeout_s) for engine in engines))
    means, maxima = [0.0], [0.0]
    for engine, answer in zip(engines, answers, strict=True):
        generation = parse_generation(answer)
        trainer = await log_probs_of([*prompt, *generation.token_ids], len(prompt))
        differences = [abs(a - b) for a, b in zip(generation.log_probs, trainer, strict=True)]
        means.append(mean(differences))
        maxima.append(max(differences))
        if not means[-1] <= tolerance:  # also true of NaN
            raise ProbeFailed(
                f"{engine} and the trainer differ by {means[-1]:.3g} nats a token on average (at most {tolerance:g} is "
                f"rounding): the engine does not serve the trainer's weights, or computes differently"
            )
    return ProbeReport(mean_difference=max(means), max_difference=max(maxima))
