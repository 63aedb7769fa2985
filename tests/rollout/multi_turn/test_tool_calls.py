"""Calls in what models say, format by format."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data import templates
from vime.errors import UserError
from vime.rollout.multi_turn.tool_calls import PARSERS, BadCall, Said, ToolCall, format_of, parser_of

ADD = ToolCall("add", {"a": 1, "b": [2, "x"]})
JSON = '{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}'
HERMES = f"<tool_call>\n{JSON}\n</tool_call>"

ONE_CALL = {
    "hermes": HERMES,
    "llama3": '{"name": "add", "parameters": {"a": 1, "b": [2, "x"]}}',
    "mistral": f"[TOOL_CALLS][{JSON}]",
    "fenced": f"```tool_call\n{JSON}\n```",
}


@pytest.mark.parametrize("name", ONE_CALL)
def test_a_call_in_each_format(name: str) -> None:
    assert PARSERS[name](ONE_CALL[name]) == Said(calls=(ADD,))


@pytest.mark.parametrize("name", PARSERS)
def test_text_without_calls_is_content(name: str) -> None:
    assert PARSERS[name]("The answer is {4}.\n") == Said(content="The answer is {4}.")
    assert PARSERS[name]("") == Said()


@pytest.mark.parametrize("name", ONE_CALL)
def test_calls_within_reasoning_are_not_made(name: str) -> None:
    call = ONE_CALL[name]
    assert PARSERS[name](f"<think>\nperhaps {call}</think>\n\nNo.") == Said(reasoning=f"perhaps {call}", content="No.")
    assert PARSERS[name](f"perhaps {call}</think>{call}").calls == (ADD,)  # the template opened the block
    assert PARSERS[name](f"<think>perhaps {call}").calls == ()  # it never ended


def test_several_calls_keep_their_order_and_the_text_around_them_is_content() -> None:
    second = HERMES.replace("add", "sub")
    said = parser_of("hermes")(f"First.\n{HERMES}\n{second} Done.")
    assert [call.name for call in said.calls if isinstance(call, ToolCall)] == ["add", "sub"]
    assert said.content.split() == ["First.", "Done."]


def test_a_turn_that_stopped_at_the_end_mark_has_its_call() -> None:
    assert PARSERS["hermes"](f"<tool_call>\n{JSON}\n") == Said(calls=(ADD,))


def test_a_list_of_calls_and_arguments_that_are_json_within_json() -> None:
    """Both are what some models learned to write."""
    inner = '{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": [2, \\"x\\"]}"}'
    assert PARSERS["hermes"](f"<tool_call>[{JSON}, {inner}]</tool_call>").calls == (ADD, ADD)


def test_llama_calls_after_the_tag_several_at_once_and_of_built_in_tools() -> None:
    parse = PARSERS["llama3"]
    assert parse('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": [2, "x"]}}').calls == (ADD,)
    assert parse(f"{JSON}; {JSON}").calls == (ADD, ADD)
    assert parse('<|python_tag|>brave_search.call(query="rain", n=2)').calls == (
        ToolCall("brave_search", {"query": "rain", "n": 2}),
    )
    assert parse("Let me see.<|python_tag|>print(1)\n") == Said(
        content="Let me see.", calls=(ToolCall("python", {"code": "print(1)"}),)
    )
    assert parse("<|python_tag|>search.call(at=(1, 2))").calls == (ToolCall("search", {"at": [1, 2]}),)
    code = "search.call(query=open('x').read())"  # no literals: it is code
    assert parse(f"<|python_tag|>{code}").calls == (ToolCall("python", {"code": code}),)


def test_mistral_calls_by_name_and_their_ids() -> None:
    parse = PARSERS["mistral"]
    assert parse('[TOOL_CALLS] [{"name": "add", "arguments": {}, "id": "abcdefghi"}]').calls == (
        ToolCall("add", {}, "abcdefghi"),
    )
    assert parse('On it.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]sub[CALL_ID]abcdefghi[ARGS]{}') == Said(
        content="On it.", calls=(ToolCall("add", {"a": 1}), ToolCall("sub", {}))
    )


def test_glm_arguments_are_texts_until_a_schema_says_what_they_are() -> None:
    arguments = [("a", "1"), ("b", "x\ny")]
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments)
    call = f"<tool_call>add\n{pairs}</tool_call>"
    parse = PARSERS["glm"]
    assert parse(f"Wait.\n{call}") == Said(content="Wait.", calls=(ToolCall("add", {"a": "1", "b": "x\ny"}),))
    assert parse("<tool_call>now</tool_call>").calls == (ToolCall("now", {}),)
    assert parse('add\n{"a": 1, "b": [2, "x"]}') == Said(calls=(ADD,))


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "not valid JSON"),
        ("hermes", "<tool_call></tool_call>", "not valid JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "names no tool"),
        ("hermes", '<tool_call>"add"</tool_call>', "names no tool"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be an object, not [1]"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "a=1"}</tool_call>', "arguments of add are not valid JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is no JSON value"),
        ("hermes", "<tool_call>" + "[" * 100_000, "not valid JSON"),
        ("hermes", '<tool_call>{"name": ' + "9" * 5000, "not valid JSON"),
        ("llama3", '{"name": "add", "parameters": {', "not valid JSON"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{", "arguments of add are not valid JSON"),
        ("glm", "<tool_call><arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "cannot be read"),
        ("glm", "<tool_call>add<arg_key>a</arg_key></tool_call>", "cannot be read"),
    ],
)
def test_a_call_that_cannot_be_read_says_to_the_model_why(name: str, text: str, error: str) -> None:
    (call,) = PARSERS[name](text).calls
    assert isinstance(call, BadCall)
    assert error in call.error and len(call.error) < 400


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (templates.QWEN25, "hermes"),
        (templates.QWEN3, "hermes"),
        (templates.CHATML, "hermes"),
        (templates.GLM, "glm"),
        ("<|start_header_id|>ipython<|end_header_id|>", "llama3"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("### Question", "fenced"),
    ],
)
def test_the_format_is_told_by_the_template(template: str, name: str) -> None:
    assert format_of(template) == name


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(UserError, match="no tool-call format 'xml'; there are hermes"):
        parser_of("xml")


HOSTILE = [
    *(("hermes", piece, "") for piece in ("<tool_call>", "</tool_call>", "<think>", "<tool_call>{</tool_call>")),
    *(("fenced", piece, "") for piece in ("```tool_call", "```", "```tool_call{```x")),
    *(("mistral", piece, "") for piece in ("[TOOL_CALLS]", "[TOOL_CALLS]a[ARGS]", "[ARGS]", "[CALL_ID]")),
    *(("llama3", piece, "") for piece in ('{"name":"f"};', '{"name":"f"}\n', '{"name":"f"};;;;;;;;')),
    ("llama3", ",a=1", "<|python_tag|>f.call(a=1"),
    ("llama3", "not ", "<|python_tag|>"),
    ("glm", "<arg_key>a</arg_key>", "<tool_call>f"),
    ("glm", "<arg_key>", "<tool_call>f"),
    ("glm", "<arg_value>a</arg_value>", "<tool_call>f<arg_key>a</arg_key>"),
    ("glm", "<arg_key>a</arg_key><arg_value>", "<tool_call>f"),
    ("glm", "<arg_key>a</arg_key><arg_value>1</arg_value>", "<tool_call>f"),
    ("glm", "<tool_call>f<arg_key>", ""),
    ("glm", " ", "<tool_call>f<arg_key>a</arg_key>"),
    *(("glm", piece, "f") for piece in ("\n", " ", "\n{", "{", "}", " \n ")),
]


@pytest.mark.parametrize(("name", "piece", "before"), HOSTILE)
def test_no_text_takes_a_parser_more_than_linear_time(name: str, piece: str, before: str) -> None:
    """What takes quadratic time takes 64 times as long for 8 times the text; parsers run on the event loop."""

    def seconds(characters: int) -> float:
        text = before + piece * (characters // len(piece)) + "!"
        begin = time.process_time()
        PARSERS[name](text)
        return time.process_time() - begin

    short, long = (min(seconds(characters) for _ in range(3)) for characters in (25_000, 200_000))
    assert long < max(24 * short, 0.1)


def test_a_key_or_value_of_glm_may_hold_the_marks_of_another() -> None:
    said = PARSERS["glm"]("<tool_call>f<arg_key>a</arg_key><arg_value><arg_key>x</arg_key></arg_value></tool_call>")
    assert said.calls == (ToolCall("f", {"a": "<arg_key>x</arg_key>"}),)


PIECES = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "```tool_call", "```"),
    *("<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "f", "\n", ";", "[", "]", "}"),
    *(
        '{"name": "f", ',
        '"arguments": {"a": 1}',
        '"parameters": ',
        "null",
        "1e999",
        "NaN",
        '"\\ud800"',
        "f.call(a=1)",
        "é",
    ),
]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_no_parser_raises_whatever_a_model_writes(text: str) -> None:
    for parse in PARSERS.values():
        said = parse(text)
        for call in said.calls:
            assert isinstance(call, BadCall) or (isinstance(call.name, str) and isinstance(call.arguments, dict))


@pytest.mark.parametrize(
    "arguments", ["a={1}", "a=b'x'", "a=1j", "a=1e999", "a={(1, 2): 3}", "a=...", "**{'a': 1}", "a=1, a=2"]
)
def test_llama3_arguments_that_json_cannot_hold_are_told_to_the_model(arguments):
    (call,) = PARSERS["llama3"](f"<|python_tag|>add.call({arguments})").calls
    assert isinstance(call, BadCall) and "arguments of add" in call.error


def test_a_number_that_no_float_holds_is_no_json():
    (call,) = PARSERS["hermes"]('<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>').calls
    assert isinstance(call, BadCall) and "1e999 is no JSON value" in call.error
