"""A generate function of a user: episodes of several turns with a tool, of which two samples become now and then."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

from tests.simulation.clock import TICK
from tests.simulation.engines import VOCABULARY
from tests.simulation.texts import Tokenizer
from tests.simulation.world import mixed
from vime.rollout.multi_turn import Transcript
from vime.types import Sample, SamplingParams, Status, derive_seed

TOOL_TOKENS = 3


async def play(args: Any, sample: Sample, sampling_params: Mapping[str, Any]) -> Sample | list[Sample]:
    """One to three turns; between them the tool says numbers that follow from the last one of the model."""
    assert isinstance(sample.prompt, str) and sample.index is not None and sample.session_id is not None
    params, tokenizer = SamplingParams(**sampling_params), Tokenizer()
    transcript = Transcript.of(sample) if sample.tokens else Transcript(tokenizer.encode(sample.prompt))

    def room() -> int:
        return min(params.max_tokens - transcript.response_length, args.max_context_tokens - len(transcript))

    status = Status.TRUNCATED
    while room() > 0:
        number, given = len(transcript.turns) - transcript.in_turn, transcript.tokens
        seed = derive_seed(params.seed or 0, "turn", number)
        asked = dataclasses.replace(params, max_tokens=room(), seed=seed)
        generation = await args.generator.generate(given, asked, session_id=sample.session_id)
        transcript.sampled(generation, given)
        if generation.finish_reason == "abort":
            status = Status.ABORTED
        elif generation.finish_reason == "stop" and number == sample.index % 3:
            status = Status.COMPLETED
        if generation.finish_reason != "stop" or status is Status.COMPLETED:
            break
        await asyncio.sleep(100 * TICK)
        if room() > TOOL_TOKENS:
            last = transcript.last_turn[-1]
            transcript.said([1 + mixed(last, place) % (VOCABULARY - 1) for place in range(TOOL_TOKENS)])
        else:
            break
    response = transcript.tokens[transcript.prompt_length :]
    transcript.write(sample, status=status, response=tokenizer.decode(response))
    return [sample, sample.copy()] if sample.ended_well and sample.index % 5 == 4 else sample
