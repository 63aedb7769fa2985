"""The default generate function: one prompt, one answer, token ids all the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vime.errors import UserError
from vime.models.routes import Pieces, grown, pieces_of, unrouted, whole
from vime.ports import Generator
from vime.types import Generation, InvalidSample, Message, Sample, SamplingParams, Status

EncodePrompt = Callable[[str | list[Message]], Sequence[int]]
DecodeTokens = Callable[[Sequence[int]], str]

STATUS_OF_FINISH = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


class SingleTurn:
    """Generates the response of a Sample, or the rest of it where an earlier attempt was aborted.

    Args:
        generator: the engines.
        encode: prompt → token ids; called once a sample.
        decode: token ids → text, for graders and people; nothing is ever encoded back.
        max_context: the most tokens that prompt and response may have together.
    """

    def __init__(self, generator: Generator, encode: EncodePrompt, decode: DecodeTokens, max_context: int) -> None:
        self._generator = generator
        self._encode = encode
        self._decode = decode
        self._max_context = max_context

    async def __call__(self, sample: Sample, params: SamplingParams) -> Sample:
        """Fills tokens, response, log-probs, versions and status of ``sample`` and returns it.

        Raises:
            UserError: the prompt leaves no room for a response.
            InvalidSample: the sample has routes of more tokens than it can have.
        """
        if not sample.tokens:
            sample.tokens = list(self._encode(sample.prompt))
        budget = self._budget(sample, params.max_tokens)
        if budget == 0:
            sample.status = Status.TRUNCATED
            return sample
        asked = unrouted(replace(params, max_tokens=budget), _routes(sample, None))
        generation = await self._generator.generate(
            sample.tokens, asked, session_id=sample.session_id or f"sample-{sample.index}"
        )
        append(sample, generation)
        sample.response = self._decode(sample.tokens[sample.prompt_length :])
        return sample

    def _budget(self, sample: Sample, max_tokens: int) -> int:
        """How many tokens may still be sampled."""
        if sample.prompt_length >= self._max_context:
            raise UserError(
                f"{sample.name}: its prompt has {sample.prompt_length} tokens, the context ends at "
                f"{self._max_context}; set --rollout-max-prompt-len to drop such prompts"
            )
        return max(0, min(max_tokens - sample.response_length, self._max_context - len(sample.tokens)))


def append(sample: Sample, generation: Generation) -> None:
    """Adds what an engine sampled to the end of ``sample``; everything before stays as it is.

    Raises:
        InvalidSample: the routes of the sample, or those of the engine, are not those of these tokens.
    """
    routes = _routes(sample, generation)
    count = len(generation.token_ids)
    if sample.loss_mask is not None:
        sample.loss_mask = [*sample.loss_mask, *([1] * count)]
    sample.tokens = [*sample.tokens, *generation.token_ids]
    sample.response_length += count
    sample.rollout_log_probs = [*(sample.rollout_log_probs or []), *generation.log_probs]
    sample.weight_versions = [*sample.weight_versions, *generation.weight_versions]
    sample.rollout_routed_experts = whole(routes)
    sample.status = STATUS_OF_FINISH[generation.finish_reason]


def _routes(sample: Sample, generation: Generation | None) -> Pieces:
    """Those of the sample, and those that a generation adds."""
    tokens = len(sample.tokens)
    try:
        known = pieces_of(sample.rollout_routed_experts, tokens)
    except ValueError as error:
        raise InvalidSample(f"{sample.name}: its rollout_routed_experts {error}") from None
    if generation is None:
        return known
    try:
        return grown(known, generation.routed_experts, tokens + len(generation.token_ids))
    except ValueError as error:
        raise InvalidSample(f"{sample.name}: the routes of what was generated {error}") from None
