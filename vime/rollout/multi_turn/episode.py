"""Plays an episode: the model speaks, the environment answers, until one of them or a limit ends it.

Whatever happens, the sample that comes back holds one transcript: what was sampled is trained, everything else is not.

* It is COMPLETED when the environment has nothing more to say to a turn that the model ended itself.
* It is TRUNCATED when there is no room for a further turn (tokens of the response, context, turns), or when the last
  turn was cut off. What would not leave room for an answer is not appended.
* It is ABORTED when its generation was interrupted; the next call goes on from there.
* It is FAILED when its prompt leaves no room for a response, or the environment raised EpisodeFailed.
"""

from __future__ import annotations

import functools
import json
import logging
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vime.data.chat import ChatTemplate
from vime.data.tokenizer import load_tokenizer
from vime.errors import UserError
from vime.models.routes import unrouted
from vime.ports import Generator
from vime.rollout.multi_turn.environment import Environment, EpisodeFailed, Turn
from vime.rollout.multi_turn.templates import TurnTemplate
from vime.rollout.multi_turn.tool_calls import Parser, format_of, parser_of
from vime.rollout.multi_turn.tools import Tool, Tools, definition_of
from vime.rollout.multi_turn.transcript import METADATA_KEY, NotAppended, Transcript
from vime.types import Message, Sample, SamplingParams, Status, derive_seed

__all__ = ["Limits", "MultiTurn"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What ends an episode, beside the tokens that the sampling parameters allow the whole response."""

    max_turns: int = 16
    max_turn_tokens: int | None = None  # of one turn; the environment sees what was cut off, and may go on
    tool_timeout_s: float | None = 60.0  # of one call; None: the tools end by themselves
    max_calls: int = 16  # in one turn
    max_result_chars: int = 8192  # of one call


class MultiTurn:
    """Plays episodes with one tokenizer on the engines of a run.

    Args:
        tokenizer: of transformers, with a chat template.
        max_context: the most tokens that prompt and response may have together.
        template_kwargs: further arguments of the chat template.
        tool_key: where the metadata hold the definitions of tools.
        call_format: how the model calls tools, e.g. "hermes"; None: as its chat template shows.
        rendered: whether prompts that are texts went through the chat template already; else they are user messages.
        skip_special_tokens: whether ``Sample.response`` is written without them.

    Raises:
        UserError: the chat template cannot be used, or there is no such format.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Any,
        *,
        max_context: int,
        template_kwargs: Mapping[str, Any] | None = None,
        tool_key: str = "tools",
        call_format: str | None = None,
        rendered: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._chat = ChatTemplate(tokenizer, kwargs=template_kwargs, tool_key=tool_key)
        self._tool_key = tool_key
        self._rendered = rendered
        self._skip_special_tokens = skip_special_tokens
        self.template = TurnTemplate(tokenizer, kwargs=template_kwargs)
        self.parse: Parser = parser_of(call_format or format_of(str(tokenizer.chat_template)))

    @classmethod
    def from_args(cls, args: Any, *, call_format: str | None = None) -> MultiTurn:
        """For the ``args`` that a generate function gets; made once and then the same again."""
        return _from_args(
            args.generator,
            args.hf_checkpoint,
            args.trust_remote_code,
            args.max_context_tokens,
            json.dumps(dict(args.apply_chat_template_kwargs)),
            args.tool_key,
            call_format,
            args.apply_chat_template,
            args.rollout_skip_special_tokens,
        )

    async def with_tools(
        self,
        sample: Sample,
        params: SamplingParams | Mapping[str, Any],
        tools: Sequence[Tool],
        limits: Limits = Limits(),
        *,
        messages: Sequence[Message] | None = None,
        resumes: bool = True,
    ) -> Sample:
        """Plays an episode in which the model may call those of ``tools`` that the metadata of the sample name, or all
        where they name none.

        Raises:
            UserError: the metadata name a tool that is not there; as ``run``.
        """
        environment = Tools(
            self._chosen(sample, tools),
            self.parse,
            timeout_s=limits.tool_timeout_s,
            max_calls=limits.max_calls,
            max_result_chars=limits.max_result_chars,
        )
        return await self.run(sample, params, environment, limits, messages=messages, tools=tools, resumes=resumes)

    async def run(
        self,
        sample: Sample,
        params: SamplingParams | Mapping[str, Any],
        environment: Environment,
        limits: Limits = Limits(),
        *,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Tool] = (),
        resumes: bool = True,
    ) -> Sample:
        """Plays an episode, or the rest of one that was aborted, and fills ``sample``.

        Args:
            params: as a generate function gets them; ``max_tokens`` is for all that follows the prompt, and the seed of
                each turn is derived from theirs.
            messages: the dialogue to begin with; None: the prompt of the sample.
            tools: what the prompt shows to the model, where it is not rendered yet and the metadata name none.
            resumes: whether an episode that was aborted can go on with this environment. One that remembers (a session
                of a sandbox, a game) cannot: then it begins anew, from the prompt.

        Raises:
            UserError: the chat template refuses a message.
            EngineError: no engine can answer; the sample is as it was.
        """
        sampling = params if isinstance(params, SamplingParams) else SamplingParams(**params)
        goes_on = resumes and bool(sample.tokens)
        transcript = Transcript.of(sample) if goes_on else Transcript(self._prompt(sample, messages, tools))
        if transcript.prompt_length >= self._max_context:
            return _too_long(
                sample, f"its prompt has {transcript.prompt_length} tokens, the context ends at {self._max_context}"
            )
        try:
            status = await self._play(transcript, sampling, environment, limits, sample)
            failure = None
        except EpisodeFailed as error:
            status, failure = Status.FAILED, str(error)
            logger.warning("%s failed: %s", sample.name, error)
        if not goes_on:
            _begin_anew(sample)
        self._write(sample, transcript, status, environment, failure)
        return sample

    async def _play(
        self, transcript: Transcript, params: SamplingParams, environment: Environment, limits: Limits, sample: Sample
    ) -> Status:
        while self._room(transcript, params):
            number = len(transcript.turns) - transcript.in_turn  # an interrupted turn goes on
            finish = await self._sample(transcript, params, number, limits.max_turn_tokens, sample)
            if finish == "abort":
                return Status.ABORTED
            is_full = not self._room(transcript, params)
            if finish == "length" and is_full:
                return Status.TRUNCATED
            turn = Turn(
                number=number,
                text=self.template.text(transcript.last_turn),
                truncated=finish == "length",
                last=is_full or number + 1 >= limits.max_turns,
            )
            messages = await environment.respond(turn)
            if not messages:
                return Status.TRUNCATED if turn.truncated else Status.COMPLETED
            if turn.last:
                return Status.TRUNCATED
            said = self.template.between(transcript.last_turn, messages)
            if self._room(transcript, params) <= len(said):
                return Status.TRUNCATED
            transcript.said(said)
        return Status.TRUNCATED

    def _room(self, transcript: Transcript, params: SamplingParams) -> int:
        """Tokens that may still be added."""
        return max(0, min(params.max_tokens - transcript.response_length, self._max_context - len(transcript)))

    async def _sample(
        self, transcript: Transcript, params: SamplingParams, number: int, most: int | None, sample: Sample
    ) -> str:
        """Samples a turn or the rest of one, of ``most`` tokens altogether, and says why it ended."""
        given, room = transcript.tokens, self._room(transcript, params)
        budget = room if most is None else min(room, max(1, most - len(transcript.last_turn)))
        seed = None if params.seed is None else derive_seed(params.seed, "turn", number)
        session = sample.session_id or f"sample-{sample.index}"
        asked = replace(params, max_tokens=budget, min_tokens=min(params.min_tokens, budget), seed=seed)
        asked = unrouted(asked, transcript.routes)
        generation = await self._generator.generate(given, asked, session_id=session)
        try:
            transcript.sampled(generation, given)
        except NotAppended as error:
            raise NotAppended(f"{sample.name}: {error}") from None
        return generation.finish_reason

    def _write(
        self, sample: Sample, transcript: Transcript, status: Status, environment: Environment, failure: str | None
    ) -> None:
        response = transcript.tokens[transcript.prompt_length :]
        text = self._tokenizer.decode(list(response), skip_special_tokens=self._skip_special_tokens)
        transcript.write(sample, status=status, response=text)
        known = sample.metadata[METADATA_KEY]
        sums = {name: known.get(name, 0) + value for name, value in environment.metadata().items()}
        answer = self.parse(self.template.text(transcript.last_turn)).content
        failures = {} if failure is None else {"failure": failure}
        sample.metadata[METADATA_KEY] = {**known, **sums, "answer": answer, **failures}

    def _prompt(self, sample: Sample, messages: Sequence[Message] | None, tools: Sequence[Tool]) -> list[int]:
        """A finished text is encoded as it stands; messages are rendered with the tools."""
        prompt = sample.prompt if messages is None else list(messages)
        if isinstance(prompt, str) and self._rendered:
            text = prompt
        else:
            dialogue = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            shown = sample.metadata.get(self._tool_key) or [definition_of(tool) for tool in tools] or None
            text = self._chat.render(dialogue, {self._tool_key: shown}, add_generation_prompt=True)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _chosen(self, sample: Sample, tools: Sequence[Tool]) -> list[Tool]:
        named = self._names(sample)
        known = {tool.name: tool for tool in tools}
        missing = [name for name in named or () if name not in known]
        if missing:
            raise UserError(
                f"{sample.name}: its metadata ({self._tool_key}) name the tool {missing[0]!r}; there are "
                f"{', '.join(known) or 'none'}"
            )
        return list(tools) if named is None else [known[name] for name in named]

    def _names(self, sample: Sample) -> list[str] | None:
        """Of the tools that its row defines, in OpenAI's form or without its frame; None: it defines none."""
        given = sample.metadata.get(self._tool_key)
        try:
            definitions = json.loads(given) if isinstance(given, str) and given else given
            return [str(each.get("function", each)["name"]) for each in definitions] if definitions else None
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise UserError(
                f"{sample.name}: its metadata ({self._tool_key}) must be a list of tool definitions in OpenAI's form, "
                f"not {reprlib.repr(given)}"
            ) from error


def _too_long(sample: Sample, why: str) -> Sample:
    """It holds no tokens: the trainer would make room for them."""
    logger.warning("%s failed: %s", sample.name, why)
    _begin_anew(sample)
    sample.response, sample.response_length, sample.status = "", 0, Status.FAILED
    sample.loss_mask, sample.rollout_log_probs, sample.weight_versions = None, None, []
    sample.metadata[METADATA_KEY] = {"turns": [], "answer": "", "failure": why}
    return sample


def _begin_anew(sample: Sample) -> None:
    """Takes away what ``Transcript.write`` would go on from: what was there before may have another prompt."""
    sample.tokens = []
    sample.metadata = {key: value for key, value in sample.metadata.items() if key != METADATA_KEY}


@functools.lru_cache(maxsize=8)
def _from_args(
    generator: Generator,
    checkpoint: str,
    trust_remote_code: bool,
    max_context: int,
    template_kwargs: str,
    tool_key: str,
    call_format: str | None,
    rendered: bool,
    skip_special_tokens: bool,
) -> MultiTurn:
    return MultiTurn(
        generator,
        load_tokenizer(checkpoint, trust_remote_code=trust_remote_code),
        max_context=max_context,
        template_kwargs=json.loads(template_kwargs),
        tool_key=tool_key,
        call_format=call_format,
        rendered=rendered,
        skip_special_tokens=skip_special_tokens,
    )
