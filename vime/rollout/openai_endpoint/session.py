"""One session: all requests that an agent makes for one sample, and the transcripts that become of them.

A request whose messages go on where an answer of ours ended continues its transcript: the tokens that were sampled stay
as they are, and what the agent added is appended. Any other request begins a transcript of its own: the agent has
edited the history, or it leads several dialogues. Nothing is recorded of a request until its answer is complete, so one
that fails may be made again. Nothing that the model writes makes a request fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from vime.data.chat import ChatTemplate
from vime.errors import EngineError, UserError
from vime.models.routes import unrouted
from vime.ports import Generator
from vime.rollout.multi_turn import BadCall, Said, ToolCall, Transcript, TurnTemplate
from vime.rollout.multi_turn.tool_calls import UNREADABLE, Parser, format_of, parser_of
from vime.rollout.multi_turn.tools import checked_arguments
from vime.rollout.multi_turn.transcript import METADATA_KEY
from vime.rollout.openai_endpoint.protocol import Answer, ChatRequest, Key, Refused, key_of, whole_characters
from vime.threads import in_thread
from vime.types import Generation, Message, Sample, SamplingParams, Status, derive_seed

Kept = Literal["all", "longest"]

_Asked: TypeAlias = tuple[tuple[Key, ...], str]  # messages and tools of a request, by which its repetition is known


_ID = re.compile("[A-Za-z0-9]{9}")


_BODY_BYTES_OF_TOKEN = 64  # tokens of texts have four characters on average, and JSON writes some in six bytes
_LARGE_CHARS = 1 << 15  # which take about 30 ms to encode


class TooLong(Exception):
    """A text has at least so many tokens, and there is no room for them."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"at least {tokens} tokens")
        self.tokens = tokens


class Speaker:
    """The model of a run as endpoints speak with it: tokenizer, chat template, format of tool calls, engines.

    Args:
        tokenizer: of transformers, with a chat template.
        template_kwargs: further arguments of the chat template.
        call_format: how the model calls tools, e.g. "hermes"; None: as its chat template shows.
        skip_special_tokens: whether ``Sample.response`` is written without them.

    Raises:
        UserError: the chat template cannot be used, or there is no such format.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Any,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        call_format: str | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        self.generator = generator
        self.template = TurnTemplate(tokenizer, kwargs=template_kwargs)
        self._chat = ChatTemplate(tokenizer, kwargs=template_kwargs)
        self._tokenizer = tokenizer
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)  # characters
        self._parse: Parser = parser_of(call_format or format_of(str(tokenizer.chat_template)))
        self._skip_special_tokens = skip_special_tokens

    async def prompt(self, request: ChatRequest, room: int) -> list[int]:
        """Token ids of a dialogue that begins with these messages.

        Raises:
            Refused: the chat template refuses them, or shows no tools.
            TooLong: there are more of them than ``room``, which is found out without making them.
        """
        text = self._rendered(request, request.tools)
        if request.tools and text == self._rendered(request, []):
            raise Refused(f"{self._chat} does not show tools to the model: describe them in a message", param="tools")
        return await self._encoded(text, room, lambda: self._encode(text))

    async def between(self, turn: tuple[int, ...], messages: list[Message], room: int) -> list[int]:
        """Token ids of what stands between a turn and the next one. Raises as ``prompt``."""
        try:
            text = self.template.text_between(messages)
        except UserError as error:
            raise Refused(str(error), param="messages") from error
        return await self._encoded(text, room, lambda: self.template.encoded_behind(turn, text))

    def said(self, turn: tuple[int, ...], stops: Iterable[str]) -> tuple[Said, str]:
        """What a turn consists of, and its text up to a stop text."""
        text = self.template.text(turn)
        end = min((at for at in map(text.find, stops) if at >= 0), default=len(text))
        return self._parse(text[:end]), text[:end]

    def response(self, transcript: Transcript) -> str:
        tokens = list(transcript.tokens[transcript.prompt_length :])
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special_tokens)
        return text

    async def _encoded(self, text: str, room: int, encode: Callable[[], list[int]]) -> list[int]:
        """Large texts in a thread: a second for each megabyte would hold up everything that the driver does."""
        least = len(text) // self._longest_token
        if least > room:
            raise TooLong(least)
        return encode() if len(text) < _LARGE_CHARS else await in_thread(encode, name="agent-text")

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _rendered(self, request: ChatRequest, tools: list[dict[str, Any]]) -> str:
        role = self.template.tool_role
        messages = [{**each, "role": role} if each["role"] == "tool" else each for each in request.messages]
        try:
            return self._chat.render(messages, {"tools": tools or None}, add_generation_prompt=True)
        except UserError as error:
            raise Refused(str(error), param="messages") from error


@dataclass(slots=True, eq=False)
class Dialogue:
    """A transcript, and the messages in which the agent knows it."""

    number: int
    tools: str
    messages: list[Key]
    transcript: Transcript
    finish_reason: str = ""
    busy: bool = False
    full: bool = False  # a request was refused because there was no room for an answer

    def goes_on(self, keys: list[Key], tools: str) -> bool:
        known = len(self.messages)
        continues = len(keys) > known and keys[:known] == self.messages and self.tools == tools
        return continues and not self.busy and all(key[0] != "assistant" for key in keys[known:])

    @property
    def status(self) -> Status:
        return Status.TRUNCATED if self.full or self.finish_reason == "length" else Status.COMPLETED


class Session:
    """The requests of one sample.

    Args:
        id: a secret that whoever knows it may speak in the name of the sample.
        params: how to sample; ``max_tokens`` is for all that follows a transcript's first prompt, and the seeds of
            requests are derived from theirs.
        session_id: which keeps the requests on one engine.
        max_context: the most tokens that prompt and response may have together.
        max_transcripts: that the requests may begin.

    Attributes:
        interrupted: set once the engines were told to stop: what the agent still does is in vain.
    """

    def __init__(
        self,
        speaker: Speaker,
        id: str,  # noqa: A002
        params: SamplingParams,
        session_id: str,
        *,
        max_context: int,
        max_transcripts: int,
    ) -> None:
        self.id = id
        self.params = params
        self.interrupted = asyncio.Event()
        self._speaker = speaker
        self._session_id = session_id
        self._max_context, self._max_transcripts = max_context, max_transcripts
        self._beginning = 0  # dialogues whose first answer is not there
        self._dialogues: list[Dialogue] = []
        self._numbers = itertools.count()
        self._failures: dict[_Asked, Exception] = {}
        self._full = False  # there was no room for an answer, and none has been asked for and given since

    async def chat(self, request: ChatRequest) -> Answer:
        """Answers a request and records it.

        Raises:
            Refused: it cannot be answered.
        """
        keys, tools, was_full = request.keys, json.dumps(request.tools, sort_keys=True), self._full
        known = self._continued(keys, tools)
        with self._at_work(known):
            dialogue = await self._begun(request, tools) if known is None else known
            said = await self._said(request, known) if known else []
            wanted = self._wanted(request, dialogue, len(said))
            transcript, generation = await self._followed(dialogue.transcript, said, wanted, (tuple(keys), tools))
        answer = self._answer(request, dialogue.number, transcript, generation)
        dialogue.transcript, dialogue.messages = transcript, [*keys, key_of(answer.message)]
        dialogue.finish_reason, dialogue.full = generation.finish_reason, False
        self._full = self._full and not was_full
        if dialogue not in self._dialogues:
            self._dialogues.append(dialogue)
        return answer

    @contextlib.contextmanager
    def _at_work(self, known: Dialogue | None) -> Iterator[None]:
        """While a dialogue is begun or goes on, no other request goes on with it, and it counts."""
        if known is None:
            self._check_number()
            self._beginning += 1
        else:
            known.busy = True
        try:
            yield
        finally:
            if known is None:
                self._beginning -= 1
            else:
                known.busy = False

    async def _begun(self, request: ChatRequest, tools: str) -> Dialogue:
        number = next(self._numbers)
        try:
            prompt = await self._speaker.prompt(request, self._max_context)
        except TooLong as error:
            self._full = True
            raise self._no_room(f"at least {error.tokens} tokens") from error
        return Dialogue(number, tools, [], Transcript(prompt))

    async def _said(self, request: ChatRequest, dialogue: Dialogue) -> list[int]:
        """What the agent has added to a dialogue, as token ids."""
        new = request.messages[len(dialogue.messages) :]
        try:
            return await self._speaker.between(dialogue.transcript.turn(-1), new, self._room(dialogue.transcript))
        except TooLong as error:
            self._full = dialogue.full = True
            raise self._no_room(f"{len(dialogue.transcript)} tokens, and at least {error.tokens} more") from error

    def samples(self, sample: Sample, kept: Kept = "all") -> list[Sample]:
        """What became of ``sample``: a copy for each transcript, in the order in which they began. None where the
        model was never asked."""
        dialogues = sorted(self._dialogues, key=lambda each: each.number)
        if kept == "longest":
            dialogues = sorted(dialogues, key=lambda each: -sum(each.transcript.loss_mask))[:1]
        return [self._sample(sample.copy(), dialogue) for dialogue in dialogues]

    @property
    def max_body_bytes(self) -> int:
        """Of a request: what a context can hold, however it is written, and a mebibyte for tools and the like."""
        return (1 << 20) + _BODY_BYTES_OF_TOKEN * self._max_context

    def body_refused(self) -> Refused:
        """How a request with a larger body is answered."""
        self._full = True
        return self._no_room(f"the body of the request has more than {self.max_body_bytes} bytes")

    @property
    def is_full(self) -> bool:
        """Whether a request was refused because there was no room for an answer, and no later one was answered."""
        return self._full

    @property
    def failure(self) -> Exception | None:
        """What the engines raised for a request, unless that was made again and answered."""
        return next(iter(self._failures.values()), None)

    def _check_number(self) -> None:
        """An agent that asks the same thing again and again, over an error say, begins transcripts without end."""
        if len(self._dialogues) + self._beginning >= self._max_transcripts:
            raise Refused(
                f"this session has {self._max_transcripts} transcripts (--agent-max-transcripts): go on with one, by "
                "sending its messages and its answers as they are",
                param="messages",
                code="too_many_transcripts",
            )

    def _continued(self, keys: list[Key], tools: str) -> Dialogue | None:
        found = [dialogue for dialogue in self._dialogues if dialogue.goes_on(keys, tools)]
        return max(found, key=lambda dialogue: len(dialogue.messages), default=None)

    def _wanted(self, request: ChatRequest, dialogue: Dialogue, said: int) -> SamplingParams:
        """How to sample the next turn.

        Raises:
            Refused: there is no room for one.
        """
        transcript, params = dialogue.transcript, self.params
        room = self._room(transcript) - said
        if room < 1:
            self._full = dialogue.full = True
            raise self._no_room(
                f"{len(transcript) + said} tokens, {transcript.response_length + said} of them after the first prompt"
            )
        most = room if request.max_tokens is None else min(room, request.max_tokens)
        turn = len(transcript.turns)
        seed = None if params.seed is None else derive_seed(params.seed, "dialogue", dialogue.number, "turn", turn)
        stop = (*params.stop, *request.stop)
        return replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most), stop=stop, seed=seed)

    def _room(self, transcript: Transcript) -> int:
        """Tokens that may follow."""
        return min(self.params.max_tokens - transcript.response_length, self._max_context - len(transcript))

    def _no_room(self, there_are: str) -> Refused:
        return Refused(
            f"there is no room for an answer: {there_are}; the context ends at {self._max_context}, the response at "
            f"{self.params.max_tokens}",
            param="messages",
            code="context_length_exceeded",
        )

    async def _followed(
        self, transcript: Transcript, said: list[int], params: SamplingParams, asked: _Asked
    ) -> tuple[Transcript, Generation]:
        """A transcript, followed by what the agent said and what the engines answered."""
        transcript = transcript.copy()
        transcript.said(said)
        given, params = transcript.tokens, unrouted(params, transcript.routes)
        try:
            generation = await self._speaker.generator.generate(given, params, session_id=self._session_id)
            if generation.finish_reason != "abort":
                transcript.sampled(generation, given)
                if not transcript.in_turn:
                    raise EngineError("an engine answered without a token")
        except Exception as error:  # whatever the engines' client raises
            self._failures[asked] = error
            raise Refused(f"the engines failed: {error}", status=502) from error
        self._failures.pop(asked, None)
        if generation.finish_reason == "abort":
            self.interrupted.set()
            raise Refused("generation was interrupted", status=503)
        return transcript, generation

    def _answer(self, request: ChatRequest, dialogue: int, transcript: Transcript, generation: Generation) -> Answer:
        said, text = self._speaker.said(transcript.turn(-1), (*self.params.stop, *request.stop))
        number = len(transcript.turns) - 1
        message = _message(said, text, request.tools if request.may_call else [], number)
        finish = "tool_calls" if "tool_calls" in message else generation.finish_reason
        return Answer(
            id=f"chatcmpl-{self._session_id}-{dialogue}-{number}",
            model=request.model,
            message=message,
            finish_reason=finish,
            prompt_tokens=len(transcript) - len(generation.token_ids),
            completion_tokens=len(generation.token_ids),
        )

    def _sample(self, sample: Sample, dialogue: Dialogue) -> Sample:
        transcript = dialogue.transcript
        transcript.write(sample, status=dialogue.status, response=self._speaker.response(transcript))
        answer, _ = self._speaker.said(transcript.turn(-1), self.params.stop)
        sample.metadata[METADATA_KEY] |= {"answer": answer.content, "dialogue": dialogue.number}
        return sample


def _message(said: Said, text: str, tools: list[dict[str, Any]], turn: int) -> Message:
    """The assistant's message. Calls that cannot be read, and those nobody offered tools for, stay text."""
    made = enumerate(call for call in said.calls if isinstance(call, ToolCall))
    calls = list(filter(None, (_call(call, tools, turn, position) for position, call in made))) if tools else []
    unread = dict.fromkeys(call.text for call in said.calls if isinstance(call, BadCall))  # a list is one text for each
    if said.calls and not calls:
        content = text.rpartition("</think>")[2].strip()
    else:
        content = "\n".join([*filter(None, [said.content]), *unread])
    message: Message = {"role": "assistant", "content": content or None}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if calls:
        message["tool_calls"] = calls
    whole: Message = whole_characters(message)
    return whole


def _call(call: ToolCall, tools: list[dict[str, Any]], turn: int, position: int) -> dict[str, Any] | None:
    """A call as the API has it; None where JSON cannot hold its arguments. Mistral's template wants ids of nine letters
    and digits."""
    arguments = dict(call.arguments)
    schema = next((tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == call.name), None)
    with contextlib.suppress(TypeError, *UNREADABLE):  # the agent says what is wrong with them, or with its schema
        arguments = checked_arguments(arguments, schema) if schema else arguments  # texts, in some formats
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (TypeError, *UNREADABLE):
        return None
    identity = call.id if call.id and _ID.fullmatch(call.id) else f"{turn:05d}{position:04d}"
    return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": written}}
