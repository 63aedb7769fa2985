"""How rows are read, and what is told of those that cannot be."""

import json
import math

import pytest

from vime.data.jsonl import MAX_LISTED, BadRow, Keys, Row, listing, load
from vime.errors import UserError

KEYS = Keys(input="prompt", label="label")


@pytest.fixture
def write(tmp_path):
    def write_file(content, name="data.jsonl"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write_file


def read_one(write, record, keys=KEYS, **options):
    file = load(write(json.dumps(record) + "\n"), keys, **options)
    return (file.rows + file.bad)[0]


def test_a_text_and_a_list_of_messages_are_prompts(write):
    messages = [{"role": "system", "content": "s", "step_loss_mask": 0}, {"role": "user", "content": "u"}]
    assert read_one(write, {"prompt": "text"}) == Row(1, "text", None, {})
    assert read_one(write, {"prompt": messages}) == Row(1, messages, None, {})


def test_a_byte_order_mark_crlf_and_blank_lines_are_fine(write):
    file = load(write(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b"}\n\n'), KEYS)
    assert [(row.line, row.prompt) for row in file.rows] == [(1, "a"), (4, "b")]
    assert file.bad == []


def test_every_bad_row_is_told_with_file_and_line(write):
    path = write('{"prompt": "a"}\n[]\n{"prompt": "a"\n"text"\n{"prompt": "b"}\n{"q": 1}\n')
    with pytest.raises(UserError) as caught:
        load(path, KEYS).require_good()
    assert str(caught.value).splitlines() == [
        f"{path}:2: a row must be a JSON object, not an array",
        f"{path}:3: not JSON: Expecting ',' delimiter at column 15",
        f"{path}:4: a row must be a JSON object, not a text",
        f"{path}:6: no key 'prompt' (--input-key), only ['q']",
    ]


def test_what_is_wrong_with_every_row_is_said_once(write):
    path = write('{"question": "a", "label": 1}\n' * 19_200)
    with pytest.raises(UserError) as caught:
        load(path, KEYS).require_good()
    assert str(caught.value) == f"{path}: all 19,200 rows: no key 'prompt' (--input-key), only ['label', 'question']"


def test_rows_that_are_bad_for_one_reason_stand_together_and_are_counted(write):
    path = write('{"prompt": "a"}\n' + '[]\n"text"\n' * 190)
    assert list(listing(path, load(path, KEYS).bad, 381)) == [
        *(f"{path}:{line}: a row must be a JSON object, not an array" for line in (2, 4, 6)),
        f"{path}: … and 187 more rows, for the same reason",
        *(f"{path}:{line}: a row must be a JSON object, not a text" for line in (3, 5, 7)),
        f"{path}: … and 187 more rows, for the same reason",
    ]


def test_a_long_list_of_bad_rows_ends_with_its_length(write):
    with pytest.raises(UserError) as caught:
        load(write("".join(f'{{"q{i}": 1}}\n' for i in range(MAX_LISTED + 5))), KEYS).require_good()
    lines = str(caught.value).splitlines()
    assert len(lines) == MAX_LISTED + 1
    assert lines[-1].endswith(": 5 more lines; `vime data check` prints all")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 13"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "not readable as JSON"),
        (b"[" * 100_000, "not readable as JSON"),
        (rb'{"prompt": "a\ud800"}', r"prompt: \ud800 is half of a character"),
        (rb'{"prompt": "a", "label": "\uDFFF"}', r"label: \udfff is half of a character"),
        (rb'{"prompt": "a", "metadata": "{\"b\": [\"\\ud800\"]}"}', r"metadata: \ud800 is half of a character"),
        (
            rb'{"prompt": [{"role": "user", "content": "\ud83d"}]}',
            r"prompt: \ud83d is half of a character",
        ),
    ],
)
def test_hostile_bytes_are_bad_rows(write, line, reason):
    assert load(write(line), KEYS).bad[0].reason.startswith(reason)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("", "prompt: is empty"),
        ([], "prompt: is empty"),
        (None, "prompt: must be a text or a list of messages, not null"),
        (3, "prompt: must be a text or a list of messages, not a number"),
        ({"role": "user"}, "prompt: must be a text or a list of messages, not an object"),
        (["hello"], "prompt: message 1 must be an object with role and content, not a text"),
        ([{"content": "x"}], "prompt: message 1 has no role"),
        ([{"role": "user"}], "prompt: message 1 has no content, only ['role']"),
        ([{"role": "user", "content": None}], "prompt: message 1: content must be a text, not null"),
        (
            [{"role": "user", "content": "x", "step_loss_mask": 2}],
            "prompt: message 1: step_loss_mask must be 0 or 1, not 2",
        ),
    ],
)
def test_bad_prompts(write, prompt, reason):
    assert read_one(write, {"prompt": prompt}) == BadRow(1, reason)


def test_an_empty_message_and_a_tool_call_without_content_are_fine(write):
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert isinstance(read_one(write, {"prompt": [{"role": "user", "content": ""}, calls]}), Row)


@pytest.mark.parametrize(
    ("raw", "label"),
    [("34", "34"), (34, "34"), (34.0, "34.0"), (0, "0"), (["34"], "34"), (True, "true"), (2**70, str(2**70))],
)
def test_scalar_labels_become_texts_and_the_raw_one_is_kept(write, raw, label):
    row = read_one(write, {"prompt": "p", "label": raw}, needs_label=True)
    assert row.label == label
    assert row.metadata.get("raw_label", label) == raw


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"label": None}, "label: is null, but the reward needs it"),
        ({"label": ""}, "label: is empty, but the reward needs it"),
        ({}, "label: is missing, but the reward needs it"),
        ({"label": {"a": 1}}, "label: must be a text or a number for this reward, not an object"),
        ({"label": ["1", "2"]}, "label: must be a text or a number for this reward, not an array"),
    ],
)
def test_a_missing_label_is_bad_only_where_the_reward_needs_one(write, record, reason):
    assert read_one(write, {"prompt": "p", **record}, needs_label=True) == BadRow(1, reason)
    assert isinstance(read_one(write, {"prompt": "p", **record}), Row)


def test_without_a_label_key_there_are_no_labels(write):
    record = {"prompt": "p", "label": "34"}
    assert read_one(write, record, Keys(input="prompt")).label is None
    bad = read_one(write, record, Keys(input="prompt"), needs_label=True)
    assert bad.reason == "the reward needs a label; name its key by --label-key"


@pytest.mark.parametrize("metadata", [{"session_id": "s"}, '{"session_id": "s"}'])
def test_metadata_may_be_an_object_or_its_json(write, metadata):
    assert read_one(write, {"prompt": "p", "metadata": metadata}).metadata == {"session_id": "s"}


@pytest.mark.parametrize("metadata", [None, "", {}, "{}"])
def test_empty_metadata(write, metadata):
    assert read_one(write, {"prompt": "p", "metadata": metadata}).metadata == {}


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ('{"a": ', "metadata: a text that is not JSON"),
        ("[1]", "metadata: must be an object, not an array"),
        ([1], "metadata: must be an object, not an array"),
    ],
)
def test_broken_metadata(write, metadata, reason):
    assert read_one(write, {"prompt": "p", "metadata": metadata}).reason.startswith(reason)


def test_numbers_of_metadata_that_are_not_finite_are_null_as_in_json(write):
    assert read_one(write, {"prompt": "p", "metadata": {"x": math.nan, "y": [math.inf]}}).metadata == {
        "x": None,
        "y": [None],
    }


def nested(depth):
    return {"a": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (
            {"metadata": {"multi_turn": True}},
            "metadata['multi_turn'] is vime's own, for samples of several turns; name",
        ),
        ({"metadata": nested(200)}, "metadata['a']['a']['a']['a']['a']… is nested more than 100 deep"),
        ({"metadata": {"n": 10**2000}}, "metadata['n'] is an integer of 6644 bits; it must have at most 4096"),
        ({"label": nested(200)}, "metadata['raw_label']['a']['a']['a']['a']… is nested more than 100 deep"),
    ],
)
def test_metadata_that_no_sample_can_have_are_a_bad_row(write, record, reason):
    assert read_one(write, {"prompt": "p", **record}, Keys(input="prompt", label="label")).reason.startswith(reason)


def test_tools_of_the_row_join_the_metadata_unless_those_have_some(write):
    assert read_one(write, {"prompt": "p", "tools": [1]}).metadata == {"tools": [1]}
    assert read_one(write, {"prompt": "p", "tools": [1], "metadata": {"tools": [2]}}).metadata == {"tools": [2]}


@pytest.mark.parametrize(
    ("bounds", "rows"),
    [
        ("[1:3]", [1, 2]),
        ("[:2]", [0, 1]),
        ("[3:]", [3, 4]),
        ("[-2:]", [3, 4]),
        ("[:-3]", [0, 1]),
        ("[:]", [0, 1, 2, 3, 4]),
    ],
)
def test_slices_take_rows_as_python_does(write, bounds, rows):
    path = write("".join(f'{{"prompt": "{i}"}}\n\n' for i in range(5)))
    assert [int(row.prompt) for row in load(f"{path}@{bounds}", KEYS).rows] == rows


def test_halves_that_make_a_character_are_one(write):
    assert load(write(rb'{"prompt": "\ud83d\ude00"}'), KEYS).rows[0].prompt == "😀"


@pytest.mark.parametrize("bounds", ["-:-", "a:b", "1", "1:2:3", ":1" + "0" * 20])
def test_what_is_no_slice_is_told(write, bounds):
    spec = write('{"prompt": "a"}\n') + f"@[{bounds}]"
    with pytest.raises(UserError) as caught:
        load(spec, KEYS)
    assert str(caught.value) == f"{spec}: a slice is FILE@[a:b], with whole numbers of up to 18 digits or none"


def test_a_slice_may_reach_far_beyond_the_file(write):
    assert len(load(write('{"prompt": "a"}\n') + f"@[-{10**17}:{10**17}]", KEYS).rows) == 1


def test_rows_outside_the_slice_are_not_looked_at(write):
    assert load(write('{"prompt": "a"}\n[]\n') + "@[:1]", KEYS).bad == []


def test_the_digest_is_that_of_the_rows_and_not_of_the_line_ends(write):
    one = load(write('{"prompt": "a"}\n', "1.jsonl"), KEYS).digest
    assert load(write('{"prompt": "a"}\r\n\r\n', "2.jsonl"), KEYS).digest == one
    assert load(write('{"prompt": "b"}\n', "3.jsonl"), KEYS).digest != one


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        load(str(tmp_path / "none.jsonl"), KEYS)
    with pytest.raises(UserError, match="there is no such file"):
        load(str(tmp_path), KEYS)


def test_parquet_is_refused(write):
    with pytest.raises(UserError, match=r"not from \.parquet"):
        load(write("x", "data.parquet"), KEYS)


def test_a_row_may_name_a_grader_that_does_without_a_label(write):
    row = {"prompt": "p", "metadata": {"rm_type": "ifbench"}}
    assert isinstance(read_one(write, row, needs_label=True), Row)
    row["metadata"]["rm_type"] = "boxed_math"
    assert read_one(write, row, needs_label=True).reason == "label: is missing, but the reward needs it"
    row["metadata"]["rm_type"] = "boxed_mth"
    assert read_one(write, row, needs_label=True).reason.startswith("metadata: rm_type: there is no grader 'boxed_mth'")
    assert isinstance(read_one(write, row), Row), "a custom function may make of it what it likes"
