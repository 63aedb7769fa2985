"""Tools: what a model may call, and how its calls are carried out.

Nothing that a model writes and nothing that a tool does ends a run: each call gives the model a message, a result or
what went wrong, within a deadline. A tool raises ``EpisodeFailed`` where the fault is neither the model's nor
the tool's (a server is down): such an episode is not trained on.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from vime.errors import EngineError, UserError
from vime.plugins.calling import OutOfTime, Raised, in_time, said
from vime.rollout.multi_turn.environment import Environment, EpisodeFailed, Turn
from vime.rollout.multi_turn.tool_calls import BadCall, Parser, ToolCall
from vime.rollout.tasks import together
from vime.threads import in_thread
from vime.types import Message

__all__ = ["BadArguments", "Tool", "ToolFailed", "ToolFunction", "Tools", "checked_arguments", "definition_of"]

Schema: TypeAlias = Mapping[str, Any]
"""A JSON schema."""


class Tool(Protocol):
    """Something that a model can call."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str:
        """What it does, for the model."""

    @property
    def parameters(self) -> Schema:
        """The schema of its arguments: ``{"type": "object", "properties": {...}, "required": [...]}``."""

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        """What the model is told: a text, or what JSON can hold. The model is also told what it raises."""


def definition_of(tool: Tool) -> dict[str, Any]:
    """How chat templates get it, in OpenAI's form."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


class ToolFunction:
    """A function as a Tool: its name, its docstring, and a schema made of its annotations.

    A plain function runs in a thread of its own, which its deadline does not end: it holds nothing up, but it runs on.
    Write a coroutine for what can take long.

    Raises:
        UserError: a parameter has no annotation, or one that JSON has no type for.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.name: str = function.__name__
        self.description: str = inspect.getdoc(function) or ""
        self.parameters: Schema = _schema_of(function)

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(**arguments)
        return await in_thread(functools.partial(self._function, **arguments), name=f"tool {self.name}")


class Tools(Environment):
    """The environment of a model that calls tools; an episode ends with the first turn that calls none.

    Args:
        parse: finds the calls in a turn.
        timeout_s: deadline of one call; None: the tools end by themselves.
        max_calls: in one turn; the model is told that further ones were not made.
        max_result_chars: what is left of a longer result are its beginning and its end.

    Raises:
        UserError: two tools have the same name.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        parse: Parser,
        *,
        timeout_s: float | None = 60.0,
        max_calls: int = 16,
        max_result_chars: int = 8192,
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise UserError(f"two tools have the same name: {', '.join(sorted(tool.name for tool in tools))}")
        self._parse = parse
        self._timeout_s = timeout_s
        self._max_calls = max_calls
        self._max_result_chars = max_result_chars
        self._calls = self._errors = self._timeouts = 0
        self._seconds = 0.0

    async def respond(self, turn: Turn) -> list[Message]:
        """One message for each call of the turn, in the order of the calls, which are carried out together. Those of a
        last turn are not carried out: nobody would hear of it."""
        calls = self._parse(turn.text).calls
        if not calls:
            return []  # or it would count how busy the event loop is
        clock = asyncio.get_running_loop().time
        begin = clock()
        contents = await together(self._answer(i, call, turn.last) for i, call in enumerate(calls))
        self._seconds += clock() - begin
        return [
            _message(turn.number, i, self._name(call), getattr(call, "id", None), content)
            for i, (call, content) in enumerate(zip(calls, contents, strict=True))
        ]

    def metadata(self) -> dict[str, float]:
        return {
            "tool_calls": self._calls,
            "tool_errors": self._errors,
            "tool_timeouts": self._timeouts,
            "tool_seconds": self._seconds,
        }

    def _name(self, call: ToolCall | BadCall) -> str:
        return call.name if isinstance(call, ToolCall) and call.name in self._tools else "unknown"

    async def _answer(self, position: int, call: ToolCall | BadCall, is_unheard: bool) -> str:
        self._calls += 1
        if position >= self._max_calls:
            return self._error(f"not called: at most {self._max_calls} calls can be made in one turn")
        if isinstance(call, BadCall):
            return self._error(call.error)
        tool = self._tools.get(call.name)
        if tool is None:
            return self._error(f"there is no tool {call.name!r}, only {', '.join(self._tools) or 'none'}")
        try:
            arguments = checked_arguments(call.arguments, tool.parameters)
        except BadArguments as error:
            return self._error(str(error))
        if is_unheard:
            return "not called: no turn follows"
        return self._shortened(await self._called(tool, arguments))

    async def _called(self, tool: Tool, arguments: Mapping[str, Any]) -> str:
        """What the tool tells the model. What it raises to end a task or a process ends the call alone.

        Raises:
            EpisodeFailed: it did: the fault is neither the model's nor the tool's.
            EngineError: an engine that it asked is lost: the sample is tried again.
        """

        async def call() -> str:
            return _text(await tool.call(arguments))

        try:
            return await in_time(call, self._timeout_s, grace_s=0)
        except OutOfTime:
            self._timeouts += 1
            return self._error(f"{tool.name} did not answer within {self._timeout_s:g} s")
        except Raised as failed:
            if isinstance(failed.error, EpisodeFailed | EngineError):
                raise failed.error from None
            return self._error(_words(tool, failed.error))

    def _error(self, reason: str) -> str:
        self._errors += 1
        return self._shortened(f"Error: {reason}")

    def _shortened(self, text: str) -> str:
        """Of limited length, and without the halves of characters that no tokenizer takes."""
        text = text.encode(errors="replace").decode()
        half = self._max_result_chars // 2
        if len(text) <= self._max_result_chars:
            return text
        return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[len(text) - half :]}"


class ToolFailed(Exception):
    """A tool did not answer. The message is for the model."""


def _message(turn: int, position: int, name: str, identity: str | None, content: str) -> Message:
    """Some templates refuse ids that are not nine letters and digits, and the model may write what it likes."""
    if identity is None or not re.fullmatch(r"[A-Za-z0-9]{9}", identity):
        identity = f"{turn:05d}{position:04d}"
    return {"role": "tool", "name": name, "tool_call_id": identity, "content": content}


def _text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _words(tool: Tool, error: BaseException) -> str:
    """What the model is told of what a tool raised."""
    if isinstance(error, SystemExit):
        return f"{tool.name} ended with exit({error.code})"
    if isinstance(error, asyncio.CancelledError):
        return f"{tool.name} was cancelled"
    words = said(error)
    return words if isinstance(error, BadArguments | ToolFailed) else f"{type(error).__name__}: {words}".rstrip(": ")


class BadArguments(ValueError):
    """Arguments that do not fit a schema; the message is for the model."""


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


def checked_arguments(arguments: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """The arguments, with the types that the schema names at its top level; texts become what they say.

    (Some formats have all arguments as texts, and models put quotes around numbers.) Nested schemas are not checked.

    Raises:
        BadArguments: one is missing, unknown, or of another type.
    """
    properties: Mapping[str, Any] = schema.get("properties") or {}
    missing = [name for name in schema.get("required") or () if name not in arguments]
    unknown = [name for name in arguments if name not in properties and not schema.get("additionalProperties")]
    if missing or unknown:
        problems = [*(f"{name} is missing" for name in missing), *(f"{name} is unknown" for name in unknown)]
        raise BadArguments(f"{', '.join(problems)}; the arguments are {', '.join(properties) or 'none'}")
    return {name: _as(name, value, properties.get(name, {})) for name, value in arguments.items()}


def _as(name: str, value: Any, schema: Any) -> Any:
    wanted = schema.get("type") if isinstance(schema, Mapping) else None
    if not isinstance(wanted, str) or wanted not in _TYPES:
        return value
    if isinstance(value, str) and wanted != "string":
        value = _read(value)
    if wanted == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, _TYPES[wanted]) or (isinstance(value, bool) and wanted != "boolean"):
        raise BadArguments(f"{name} must be of type {wanted}, not {value!r}"[:300])
    if "enum" in schema and value not in schema["enum"]:
        raise BadArguments(f"{name} must be one of {', '.join(map(str, schema['enum']))}, not {value!r}"[:300])
    return value


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _schema_of(function: Callable[..., Any]) -> Schema:
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    unknown = [name for name in parameters if name not in hints]
    if unknown:
        raise UserError(f"the tool {function.__name__}: its parameter {unknown[0]} needs an annotation")
    return {
        "type": "object",
        "properties": {name: _schema_of_type(hints[name], f"{function.__name__}: {name}") for name in parameters},
        "required": [name for name, each in parameters.items() if each.default is inspect.Parameter.empty],
    }


def _schema_of_type(hint: Any, about: str) -> Schema:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):  # int | None: an argument that may be left out
        kinds = [each for each in arguments if each is not type(None)]
        if len(kinds) == 1:
            return _schema_of_type(kinds[0], about)
    if origin is Literal and len({type(each) for each in arguments}) == 1:
        return {**_schema_of_type(type(arguments[0]), about), "enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _schema_of_type(arguments[0], about)}
    names = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
    if (origin or hint) not in names:
        raise UserError(f"the tool {about}: JSON has no type for {hint!r}; write a class with a schema (Tool)")
    return {"type": names[origin or hint]}
