"""Chat completions as OpenAI's API has them: what a request may ask for, and how an answer is written.

A request is taken as it is or refused in one line; nothing that would change what is sampled is passed over in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from vime.types import Message, SamplingParams

Key: TypeAlias = tuple[Any, ...]
"""What two messages have in common that say the same; see ``key_of``."""

_IGNORED = frozenset(
    {
        *("model", "user", "metadata", "store", "service_tier", "parallel_tool_calls", "reasoning_effort"),
        *("prompt_cache_key", "safety_identifier", "seed", "verbosity"),
    }
)
"""Fields that may say what they like. Seeds are the run's, so that each sample has its own."""

_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
"""Fields that are understood, and must have a value that changes nothing (or null)."""

_OURS = frozenset(
    {
        *("messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "stream"),
        *("stream_options", "temperature", "top_p", "top_k"),
    }
)


class Refused(Exception):
    """A request that gets an error as its answer."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request that can be answered."""

    messages: list[Message]  # as chat templates take them: contents are texts
    tools: list[dict[str, Any]] = field(default_factory=list)
    may_call: bool = True
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    model: str = ""
    stream: bool = False
    include_usage: bool = False

    @property
    def keys(self) -> list[Key]:
        return [key_of(message) for message in self.messages]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model said."""

    id: str
    model: str
    message: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int

    def body(self) -> dict[str, Any]:
        choice = {"index": 0, "message": self.message, "logprobs": None, "finish_reason": self.finish_reason}
        return {**self._frame("chat.completion"), "choices": [choice], "usage": self._usage()}

    def chunks(self, *, include_usage: bool) -> Iterator[dict[str, Any]]:
        """The same in pieces, for a client that wants a stream."""
        calls = [{"index": index, **call} for index, call in enumerate(self.message.get("tool_calls", ()))]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{name: self.message[name]} for name in ("reasoning_content", "content") if self.message.get(name)]
        deltas += [{"tool_calls": [call]} for call in calls]
        for delta in deltas:
            yield self._chunk([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])
        yield self._chunk([{"index": 0, "delta": {}, "logprobs": None, "finish_reason": self.finish_reason}])
        if include_usage:
            yield {**self._chunk([]), "usage": self._usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._frame("chat.completion.chunk"), "choices": choices}

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": 0, "model": self.model}  # no clock: a run can be simulated

    def _usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


def read_request(body: Any, params: SamplingParams, *, ignores_sampling: bool = False) -> ChatRequest:
    """Reads the body of ``POST /v1/chat/completions``.

    Args:
        params: how the run samples; other wishes are refused.
        ignores_sampling: pass over temperature, top_p and top_k instead.

    Raises:
        Refused: with 400.
    """
    if not isinstance(body, dict):
        raise Refused("the body of the request must be a JSON object")
    body = {name: value for name, value in body.items() if value is not None}
    for name, value in body.items():
        if name not in _IGNORED and name not in _OURS:
            _check_neutral(name, value)
    if not ignores_sampling:
        _check_sampling(body, params)
    return ChatRequest(
        messages=_messages(body.get("messages")),
        tools=_tools(body),
        may_call=body.get("tool_choice") != "none",
        max_tokens=_max_tokens(body),
        stop=_stop(body.get("stop", ())),
        model=str(body.get("model", "")),
        stream=body.get("stream", False) is True,
        include_usage=_include_usage(body),
    )


def whole_characters(value: Any) -> Any:
    """A JSON value without halves of characters (surrogates): JSON can name them, and models do, but neither tokenizers
    nor HTTP take them."""
    match value:
        case str():
            return value.encode(errors="replace").decode()
        case list():
            return [whole_characters(each) for each in value]
        case dict():
            return {whole_characters(name): whole_characters(each) for name, each in value.items()}
    return value


def key_of(message: Mapping[str, Any]) -> Key:
    """Clients send answers back with fields left out, white space trimmed and arguments written anew."""
    calls = tuple(_call_key(call) for call in message.get("tool_calls") or ())
    content = message.get("content") or ""
    if message["role"] == "assistant":
        return ("assistant", content.strip(), calls)
    return (message["role"], content, message.get("tool_call_id"))


def _call_key(call: Mapping[str, Any]) -> Key:
    function = call["function"]
    try:
        arguments = json.dumps(json.loads(function["arguments"]), sort_keys=True)
    except (ValueError, RecursionError):
        arguments = function["arguments"]
    return (call.get("id"), function["name"], arguments)


def _check_neutral(name: str, value: Any) -> None:
    if name not in _NEUTRAL:
        raise Refused(f"the field {name} is unknown here", param=name)
    if value not in _NEUTRAL[name]:
        allowed = " or ".join(json.dumps(each) for each in _NEUTRAL[name])
        raise Refused(
            f"{name} {json.dumps(value)} is not offered here: leave it out{allowed and f' or give {allowed}'}"
        )


def _check_sampling(body: Mapping[str, Any], params: SamplingParams) -> None:
    for name, ours in (("temperature", params.temperature), ("top_p", params.top_p), ("top_k", params.top_k)):
        value = body.get(name, ours)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != ours:
            raise Refused(
                f"{name} {json.dumps(value)}: this run samples with {name} {ours:g}, and is trained on that; "
                "leave it out (--agent-sampling ignore passes over it)",
                param=name,
            )


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise Refused("messages must be a list of at least one message", param="messages")
    messages = [_message(each, f"messages[{i}]") for i, each in enumerate(value)]
    if messages[-1]["role"] == "assistant":
        raise Refused("the last message is the assistant's: there is nothing to answer", param="messages")
    return messages


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise Refused(f"{where} must be an object", param=where)
    role = {"developer": "system"}.get(str(value.get("role")), value.get("role"))
    if role not in ("system", "user", "assistant", "tool"):
        raise Refused(f"{where}.role must be system, developer, user, assistant or tool, not {role!r}", param=where)
    message: Message = {"role": role, "content": _text(value.get("content"), where)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(value.get(name), str):
            message[name] = value[name]
    if role == "assistant" and value.get("tool_calls"):
        message["tool_calls"] = _calls(value["tool_calls"], where)
    return message


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise Refused(f"{where}.content must be a text, or parts of type text", param=where)
    return content


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise Refused(f"{where}.tool_calls must be a list", param=where)
    return [_call(each, where) for each in value]


def _call(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not isinstance(function.get("arguments"), str)
    ):
        raise Refused(f"{where}.tool_calls must hold functions, each with name and arguments", param=where)
    kept = {"name": function["name"], "arguments": function["arguments"]}
    return {"id": str(value.get("id", "")), "type": "function", "function": kept}


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools, choice = body.get("tools", []), body.get("tool_choice", "auto")
    if not isinstance(tools, list) or not all(_is_function(tool) for tool in tools):
        raise Refused("tools must be a list of functions, each with a name and, if any, a schema", param="tools")
    if choice not in ("auto", "none"):
        raise Refused(f"tool_choice {json.dumps(choice)} is not offered here: give auto or none", param="tool_choice")
    return tools


def _is_function(tool: Any) -> bool:
    return (
        isinstance(tool, dict)
        and tool.get("type") == "function"
        and isinstance(tool.get("function"), dict)
        and isinstance(tool["function"].get("name"), str)
        and isinstance(tool["function"].get("parameters") or {}, dict)
    )


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    given = [body[name] for name in ("max_tokens", "max_completion_tokens") if name in body]
    for value in given:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise Refused(f"max_tokens must be a whole number from 1, not {json.dumps(value)}", param="max_tokens")
    return min(given, default=None)


def _stop(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise Refused("stop must be a text, or a list of texts", param="stop")
    return tuple(texts)


def _include_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options", {})
    return isinstance(options, dict) and options.get("include_usage") is True
