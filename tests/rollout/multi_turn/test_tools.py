"""Calls are carried out within their deadlines, and whatever happens, the model is told."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any, Literal

import pytest

from tests.plugins import odd
from vime.errors import EngineError, UserError
from vime.rollout.multi_turn import EpisodeFailed, ToolFunction, Tools, Turn
from vime.rollout.multi_turn.tool_calls import PARSERS
from vime.rollout.multi_turn.tools import BadArguments, checked_arguments, definition_of


async def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


def shout(word: str) -> str:
    """Says it louder."""
    return word.upper() + "\ud800"


async def breaks() -> str:
    raise ValueError("no\ngood")


async def leaves() -> str:
    sys.exit(3)


async def gives_up() -> str:
    raise asyncio.CancelledError


async def closes() -> None:
    odd.closes()


def interrupts() -> None:
    odd.interrupts()


async def raises_a_group() -> None:
    odd.raises_a_group()


async def lists(path: str) -> dict[str, Any]:
    return {"path": path, "files": []}


async def returns_an_object() -> object:
    return object()


async def outage() -> str:
    raise EpisodeFailed("the sandbox is down")


class Stubborn:
    """A tool that does not end when it is cancelled."""

    name, description, parameters = "stubborn", "", {"type": "object", "properties": {}}

    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def call(self, arguments: Mapping[str, Any]) -> str:
        while not self.released.is_set():
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await self.released.wait()
        return "late"


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def tools(*functions: Any, **limits: Any) -> Tools:
    return Tools(
        [each if hasattr(each, "call") else ToolFunction(each) for each in functions], PARSERS["hermes"], **limits
    )


async def told(environment: Tools, text: str) -> list[str]:
    turn = Turn(number=2, text=text, truncated=False)
    return [str(message["content"]) for message in await environment.respond(turn)]


async def test_calls_are_answered_in_their_order_each_by_a_message() -> None:
    environment = tools(add, shout, lists)
    text = call("add", '{"a": 1, "b": 2}') + call("shout", '{"word": "hi"}') + call("lists", '{"path": "ä"}')
    messages = await environment.respond(Turn(number=2, text=text, truncated=False))
    assert messages == [
        {"role": "tool", "name": "add", "tool_call_id": "000020000", "content": "3"},
        {"role": "tool", "name": "shout", "tool_call_id": "000020001", "content": "HI?"},
        {"role": "tool", "name": "lists", "tool_call_id": "000020002", "content": '{"path": "ä", "files": []}'},
    ]
    assert environment.metadata() | {"tool_seconds": 0} == {
        "tool_calls": 3,
        "tool_errors": 0,
        "tool_timeouts": 0,
        "tool_seconds": 0,
    }


@pytest.mark.parametrize(("given", "kept"), [("abc123XYZ", "abc123XYZ"), ("call 1", "000020000"), (7, "000020000")])
async def test_ids_of_the_model_are_kept_where_every_template_takes_them(given: object, kept: str) -> None:
    text = f'[TOOL_CALLS][{{"name": "\\ud800", "arguments": {{}}, "id": {json.dumps(given)}}}]'
    (message,) = await Tools([], PARSERS["mistral"]).respond(Turn(number=2, text=text, truncated=False))
    assert (message["tool_call_id"], message["name"]) == (kept, "unknown")


async def test_a_turn_without_calls_is_not_answered() -> None:
    environment = tools(add)
    assert await told(environment, "The answer is 3.") == []
    assert environment.metadata()["tool_seconds"] == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (call("mul"), "Error: there is no tool 'mul', only add, breaks, leaves, gives_up, closes, "),
        (call("add"), "Error: a is missing; the arguments are a, b"),
        (call("add", '{"a": "x"}'), "Error: a must be of type integer, not 'x'"),
        (call("add", '{"a": 1, "c": 2}'), "Error: c is unknown; the arguments are a, b"),
        ("<tool_call>add(1)</tool_call>", "Error: the call is not valid JSON (Expecting value at character 1); write "),
        (call("\\ud800"), "Error: there is no tool '\\ud800', only add"),
        ('<tool_call>{"name": "\\ud800", "arguments": 1}</tool_call>', "Error: the arguments of ? must be an object"),
        (call("breaks"), "Error: ValueError: no good"),
        (call("leaves"), "Error: leaves ended with exit(3)"),
        (call("gives_up"), "Error: gives_up was cancelled"),
        (call("closes"), "Error: GeneratorExit"),
        (call("interrupts"), "Error: KeyboardInterrupt"),
        (call("raises_a_group"), "Error: BaseExceptionGroup: both (2 sub-exceptions)"),
        (call("returns_an_object"), "Error: TypeError: Object of type object is not JSON serializable"),
    ],
)
async def test_what_goes_wrong_is_told_to_the_model_and_counted(text: str, expected: str) -> None:
    environment = tools(add, breaks, leaves, gives_up, closes, interrupts, raises_a_group, returns_an_object)
    (said,) = await told(environment, text)
    assert said.startswith(expected)
    assert environment.metadata()["tool_errors"] == 1


async def test_a_tool_that_is_too_slow_is_not_waited_for_even_if_it_will_not_end() -> None:
    stubborn = Stubborn()
    environment = tools(stubborn, add, timeout_s=0.05)
    said = await asyncio.wait_for(told(environment, call("stubborn") + call("add", '{"a": 1}')), 20)
    assert said == ["Error: stubborn did not answer within 0.05 s", "2"]
    counts = environment.metadata()
    assert (counts["tool_calls"], counts["tool_errors"], counts["tool_timeouts"]) == (2, 1, 1)
    assert 0.05 <= counts["tool_seconds"] < 20
    stubborn.released.set()


async def test_plain_functions_that_never_return_hold_up_no_other_tool_and_no_thread_of_the_event_loop() -> None:
    released = threading.Event()

    def hangs() -> None:
        released.wait()

    stuck = (os.cpu_count() or 1) + 6  # more than the event loop has threads for
    try:
        environment = tools(hangs, timeout_s=0.05, max_calls=stuck)
        assert await told(environment, call("hangs") * stuck) == ["Error: hangs did not answer within 0.05 s"] * stuck
        assert await told(tools(shout, timeout_s=5), call("shout", '{"word": "hi"}')) == ["HI?"]
        assert await asyncio.wait_for(asyncio.to_thread(shout, "hi"), 5) == "HI\ud800"
    finally:
        released.set()


async def test_a_tool_without_a_deadline_ends_by_itself() -> None:
    async def waits_for_its_turn() -> str:
        await asyncio.sleep(0.1)
        return "done"

    assert await told(tools(waits_for_its_turn, timeout_s=0.01), call("waits_for_its_turn")) != ["done"]
    assert await told(tools(waits_for_its_turn, timeout_s=None), call("waits_for_its_turn")) == ["done"]


async def test_calls_of_one_turn_run_together() -> None:
    both = asyncio.Barrier(2)

    async def meets() -> str:
        await both.wait()
        return "met"

    assert await told(tools(meets, timeout_s=5), call("meets") * 2) == ["met", "met"]


async def test_calls_end_with_the_episode_that_made_them() -> None:
    ended = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    episode = asyncio.create_task(told(tools(waits), call("waits")))
    await asyncio.sleep(0.01)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    await asyncio.wait_for(ended.wait(), 1)


async def loses_an_engine() -> str:
    raise EngineError("engine 0 does not answer")


@pytest.mark.parametrize("tool", [outage, loses_an_engine])
async def test_an_outage_is_no_message_for_the_model(tool: Any) -> None:
    """A sample that lost an engine in a tool is tried again like one that lost it by itself."""
    with pytest.raises((EpisodeFailed, EngineError), match=r"the sandbox is down|engine 0 does not answer"):
        await told(tools(tool, add), call("add", '{"a": 1}') + call(tool.__name__))


async def test_further_calls_than_one_turn_may_make_are_not_made() -> None:
    said = await told(tools(add, max_calls=2), call("add", '{"a": 1}') * 3)
    assert said == ["2", "2", "Error: not called: at most 2 calls can be made in one turn"]


async def test_the_middle_of_a_long_result_is_left_out() -> None:
    async def long() -> str:
        return "a" * 60 + "b" * 60

    (said,) = await told(tools(long, max_result_chars=20), call("long"))
    assert said == "a" * 10 + "\n[100 characters left out]\n" + "b" * 10


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(UserError, match="two tools have the same name: add, add"):
        tools(add, add)


def test_the_definition_of_a_function_is_made_of_its_annotations() -> None:
    def search(query: str, kinds: list[str], top: int | None = None, order: Literal["new", "old"] = "new") -> str:
        """Searches."""
        return ""

    assert definition_of(ToolFunction(search)) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "kinds": {"type": "array", "items": {"type": "string"}},
                    "top": {"type": "integer"},
                    "order": {"type": "string", "enum": ["new", "old"]},
                },
                "required": ["query", "kinds"],
            },
        },
    }


def test_functions_that_give_no_schema_are_refused() -> None:
    def untyped(a):  # type: ignore[no-untyped-def]
        return a

    def of_bytes(a: bytes) -> str:
        return ""

    with pytest.raises(UserError, match="untyped: its parameter a needs an annotation"):
        ToolFunction(untyped)
    with pytest.raises(UserError, match="of_bytes: a: JSON has no type for <class 'bytes'>"):
        ToolFunction(of_bytes)


SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "on": {"type": "boolean"},
        "word": {"type": "string", "enum": ["a", "12"]},
        "any": {},
    },
}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"n": "12", "x": "1.5", "on": "true"}, {"n": 12, "x": 1.5, "on": True}),  # as some formats have it
        ({"n": 3.0, "x": 3, "word": "12", "any": "12"}, {"n": 3, "x": 3, "word": "12", "any": "12"}),
    ],
)
def test_arguments_get_the_types_of_the_schema(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert checked_arguments(given, SCHEMA) == wanted


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"n": True}, "n must be of type integer, not True"),
        ({"n": 1.5}, "n must be of type integer, not 1.5"),
        ({"word": 12}, "word must be of type string, not 12"),
        ({"word": "b"}, "word must be one of a, 12, not 'b'"),
        ({"n": "[" * 100_000}, "n must be of type integer"),
    ],
)
def test_arguments_of_other_types_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadArguments, match=reason) as caught:
        checked_arguments(given, SCHEMA)
    assert len(str(caught.value)) <= 300
