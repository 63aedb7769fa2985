"""Calls of tools in what a model says: text → calls. Pure functions, one a format.

A call that cannot be read becomes a ``BadCall`` whose error is written for the model, which can try again. Nothing here
raises for what a model wrote, or takes more than linear time: parsers run on the event loop. Reasoning is not searched:
a call that is only thought of is no call.

The formats are those in which chat templates show calls to the model:

==========  ==========================================================================================
hermes      ``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`` (Qwen, Hermes, SmolLM2)
llama3      ``{"name": "add", "parameters": {"a": 1}}``, ``<|python_tag|>`` before that, before
            ``search.call(query="x")`` or before Python code (a call of ``python`` with the argument ``code``)
mistral     ``[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]`` and ``[TOOL_CALLS]add[ARGS]{"a": 1}``
glm         ``<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>``, and GLM-4's
            name in one line with JSON in the next
fenced      a block of three backticks named ``tool_call`` with JSON as in hermes, for templates that know no tools
==========  ==========================================================================================
"""

from __future__ import annotations

import ast
import json
import math
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from vime.errors import UserError

__all__ = ["PARSERS", "BadCall", "Parser", "Said", "ToolCall", "format_of", "parser_of"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the model wants to have done."""

    name: str
    arguments: Mapping[str, Any]  # of the glm format: the texts as they stand, whatever their type
    id: str | None = None  # where the format has one


@dataclass(frozen=True, slots=True)
class BadCall:
    """An attempt to call that cannot be read."""

    text: str  # what the model wrote
    error: str  # for the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a turn of the model consists of."""

    reasoning: str = ""  # within <think>
    content: str = ""  # beside reasoning and calls
    calls: tuple[ToolCall | BadCall, ...] = ()  # in the order in which they were made


Parser: TypeAlias = Callable[[str], Said]
"""The text of a turn, without its end token → what it consists of."""

_Found: TypeAlias = tuple[str, Sequence[ToolCall | BadCall]]  # (text beside the calls, calls)


def hermes(text: str) -> Said:
    return _outside_reasoning(text, lambda answer: _blocks(answer, "<tool_call>", "</tool_call>", _json_calls))


def llama3(text: str) -> Said:
    return _outside_reasoning(text, _llama3)


def mistral(text: str) -> Said:
    return _outside_reasoning(text, _mistral)


def glm(text: str) -> Said:
    return _outside_reasoning(text, _glm)


def fenced(text: str) -> Said:
    return _outside_reasoning(text, lambda answer: _blocks(answer, "```tool_call", "```", _json_calls))


PARSERS: Mapping[str, Parser] = {
    "hermes": hermes,
    "llama3": llama3,
    "mistral": mistral,
    "glm": glm,
    "fenced": fenced,
}
"""By the name of the format."""

_SIGNS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<arg_key>", "glm"),
    ("<|observation|>", "glm"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ("<|start_header_id|>", "llama3"),
    ("<|im_start|>", "hermes"),
)


def format_of(chat_template: str) -> str:
    """The format in which models with that chat template call tools, told by the marks that the template uses."""
    return next((name for sign, name in _SIGNS if sign in chat_template), "fenced")


def parser_of(name: str) -> Parser:
    """The parser of a format.

    Raises:
        UserError: there is none of that name.
    """
    if name not in PARSERS:
        raise UserError(f"there is no tool-call format {name!r}; there are {', '.join(PARSERS)}")
    return PARSERS[name]


def _outside_reasoning(text: str, find: Callable[[str], _Found]) -> Said:
    """Reasoning ends with the last ``</think>``; its beginning may have been the template's."""
    reasoning, closed, answer = text.rpartition("</think>")
    if not closed and "<think>" in answer:
        return Said(reasoning=answer.replace("<think>", "", 1).strip())
    content, calls = find(answer)
    return Said(reasoning=reasoning.replace("<think>", "", 1).strip(), content=content.strip(), calls=tuple(calls))


def _blocks(text: str, begin: str, end: str, read: Callable[[str], Iterator[ToolCall | BadCall]]) -> _Found:
    """Calls between two marks; the last block may end with the text (a turn can stop at the mark)."""
    content, *blocks = text.split(begin)
    contents = [content]
    calls: list[ToolCall | BadCall] = []
    for block in blocks:
        body, _, behind = block.partition(end)
        calls += read(body.strip())
        contents.append(behind)
    return "".join(contents), calls


def _json_calls(text: str) -> Iterator[ToolCall | BadCall]:
    """One call as JSON, or a list of them."""
    try:
        value = _DECODER.decode(text)
    except UNREADABLE as error:
        yield BadCall(text, f"the call is not valid JSON ({_reason(error)}); {_WRITE}")
        return
    for each in value if isinstance(value, list) else [value]:
        yield _call_of(each, text)


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON value")


def _finite(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _refused(text)


_DECODER = json.JSONDecoder(parse_constant=_refused, parse_float=_finite)
UNREADABLE = (ValueError, RecursionError, MemoryError)
"""What parsers raise for texts that nest too deeply, or have numbers of too many digits."""

_WRITE = 'write {"name": "...", "arguments": {...}}'


def _call_of(value: Any, text: str) -> ToolCall | BadCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return BadCall(text, f"the call names no tool; {_WRITE}")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON
        try:
            arguments = _DECODER.decode(arguments)
        except UNREADABLE as error:
            return BadCall(text, f"the arguments of {value['name']} are not valid JSON ({_reason(error)}); {_WRITE}")
    if not isinstance(arguments, dict):
        return BadCall(
            text, f"the arguments of {value['name']} must be an object, not {reprlib.repr(arguments)}; {_WRITE}"
        )
    identity = value.get("id")
    return ToolCall(value["name"], arguments, identity if isinstance(identity, str) else None)


_BLANKS = re.compile(r"\s*")
_SEPARATORS = re.compile(r"[; \t\r\n]*")


def _behind(skipped: re.Pattern[str], text: str, position: int) -> int:
    """Where what is skipped ends. In place: a copy of the rest for each call would take quadratic time."""
    found = skipped.match(text, position)
    assert found is not None  # the patterns match the empty text
    return found.end()


def _llama3(text: str) -> _Found:
    content, tagged, body = text.partition("<|python_tag|>")
    if not tagged:
        content, body = "", text
        if not (body.lstrip().startswith("{") and '"name"' in body):
            return text, ()
    body = body.strip()
    if body.startswith("{"):
        return content, _json_values(body)
    return content, [_builtin_call(body) or ToolCall("python", {"code": body})]


def _json_values(text: str) -> list[ToolCall | BadCall]:
    """Objects one after the other, with ``;`` or white space between them."""
    position = 0
    calls: list[ToolCall | BadCall] = []
    while position < len(text):
        try:
            value, end = _DECODER.raw_decode(text, position)
        except UNREADABLE as error:
            return [*calls, BadCall(text[position:], f"the call is not valid JSON ({_reason(error)}); {_WRITE}")]
        calls.append(_call_of(value, text[position:end]))
        position = _behind(_SEPARATORS, text, end)
    return calls


def _builtin_call(text: str) -> ToolCall | BadCall | None:
    """``name.call(key="value")``; None: it is something else."""
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, *UNREADABLE):
        return None
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="call"), args=[], keywords=keywords):
            return _with_literals(name, keywords, text)
    return None


def _with_literals(name: str, keywords: Sequence[ast.keyword], text: str) -> ToolCall | BadCall | None:
    """Arguments as JSON has them: tuples are lists, and sets, bytes or numbers without end are nothing."""
    try:
        values = {each.arg: ast.literal_eval(each.value) for each in keywords if each.arg is not None}
    except (TypeError, *UNREADABLE):
        return None
    if len(values) < len(keywords):
        return BadCall(text, f"the arguments of {name} must each be named, once: {name}.call(key=value)")
    try:
        return ToolCall(name, _DECODER.decode(json.dumps(values, allow_nan=False)))
    except (TypeError, *UNREADABLE) as error:
        return BadCall(text, f"JSON cannot hold the arguments of {name} ({_reason(error)})")


def _mistral(text: str) -> _Found:
    content, *bodies = text.split("[TOOL_CALLS]")
    calls: list[ToolCall | BadCall] = []
    for body in bodies:
        name, named, arguments = body.partition("[ARGS]")
        calls += _named_call(name, arguments, body) if named else _json_calls(body.strip())
    return content, calls


def _named_call(name: str, arguments: str, text: str) -> Iterator[ToolCall | BadCall]:
    """A name, and arguments as JSON."""
    yield _call_of({"name": name.partition("[CALL_ID]")[0].strip(), "arguments": arguments.strip()}, text)


_ARGUMENT = re.compile(  # possessive, or it would look for the end of a key without a value again and again
    r"<arg_key>(?P<key>(?:(?!</arg_key>).)*+)</arg_key>\s*+"
    r"<arg_value>(?P<value>(?:(?!</arg_value>).)*+)</arg_value>\s*+",
    re.DOTALL,
)
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_WRITE_GLM = "write <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>"


def _glm(text: str) -> _Found:
    if "<tool_call>" in text:
        return _blocks(text, "<tool_call>", "</tool_call>", _glm_call)
    head, brace, behind = text.partition("{")
    name = head.strip()
    if _NAME.fullmatch(name) and "\n" in head.lstrip() and behind.rstrip().endswith("}"):
        return "", list(_named_call(name, brace + behind, text))
    return text, ()


def _glm_call(text: str) -> Iterator[ToolCall | BadCall]:
    name, begun, behind = text.partition("<arg_key>")
    arguments = _glm_arguments(begun + behind)
    if arguments is None or not name.strip():
        yield BadCall(text, f"the call cannot be read; {_WRITE_GLM}")
        return
    yield ToolCall(name.strip(), arguments)


def _glm_arguments(text: str) -> dict[str, str] | None:
    """Keys and values in turn; None: it is something else."""
    arguments: dict[str, str] = {}
    position = 0
    while position < len(text):
        found = _ARGUMENT.match(text, position)
        if found is None:
            return None
        arguments[found["key"].strip()] = found["value"]
        position = found.end()
    return arguments


def _reason(error: BaseException) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"
    return " ".join(str(error).split())[:200]
