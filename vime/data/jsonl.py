"""Prompt files: one JSON object a line, read row by row, with bad rows told as ``file:line: reason``.

A byte-order mark, CRLF line ends and blank lines are fine. ``FILE@[a:b]`` takes rows a to b-1 (blank lines are no
rows), with Python's rules for omitted and negative bounds.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from vime.errors import UserError
from vime.metadata import BadMetadata, checked
from vime.rewards import registry
from vime.types import Message

MAX_LISTED = 20
"""How many lines a message has for bad rows; ``vime data check`` prints all of them."""

ALIKE = 3
"""How many rows are listed that are bad for one reason; the others are counted."""

NEEDS_TEMPLATE = (
    "the prompt is a list of messages: set --apply-chat-template, or generate by --custom-generate-function-path"
)

_SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>(-?\d{1,18})?):(?P<stop>(-?\d{1,18})?)\]")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Under which keys a row holds what. ``label`` None: rows have no label."""

    input: str = "input"
    label: str | None = None
    metadata: str = "metadata"
    tools: str = "tools"


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt. Hooks get copies; nobody changes a row."""

    line: int
    prompt: str | list[Message]
    label: str | None
    metadata: dict[
        str, Any
    ]  # with the row's tool definitions under the tool key; a label that was no string as raw_label


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row which cannot be read, and why."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class PromptFile:
    """All rows of a file (or of its slice)."""

    path: str
    rows: list[Row]
    bad: list[BadRow]
    digest: str  # SHA-256 over the bytes of the rows

    def require_good(self) -> None:
        """Raises UserError with the lines of ``listing``, if there is a bad row."""
        require_none(self.path, self.bad, self.total)

    @property
    def total(self) -> int:
        """All rows, good and bad."""
        return len(self.rows) + len(self.bad)

    def require_labels(self, keys: Keys) -> None:
        """Raises UserError where no row has a label under the key that was given for labels. Some may lack one."""
        if keys.label is not None and self.rows and all(row.label is None for row in self.rows):
            raise UserError(
                f"{self.path}: no row has a label under the key {keys.label!r} (--label-key); the first row has "
                f"{_keys_at(Path(self.path), self.rows[0].line)}"
            )

    def require_texts(self) -> None:
        """Raises UserError where a prompt is a list of messages."""
        line = next((row.line for row in self.rows if not isinstance(row.prompt, str)), None)
        if line is not None:
            raise UserError(f"{self.path}:{line}: {NEEDS_TEMPLATE}")


def require_none(path: str, bad: list[BadRow], total: int) -> None:
    """Raises UserError with the lines of ``listing``, if there is a bad row; at most ``MAX_LISTED`` of them."""
    lines = list(listing(path, bad, total))
    if lines[MAX_LISTED:]:
        lines[MAX_LISTED:] = [f"{path}: {len(lines) - MAX_LISTED} more lines; `vime data check` prints all"]
    if lines:
        raise UserError("\n".join(lines))


def listing(path: str, bad: Sequence[BadRow], total: int) -> Iterator[str]:
    """What is wrong with a file of ``total`` rows: a line for each bad row, those that are bad for one reason together
    and only the first ``ALIKE`` of them, or one line for a reason that all rows share."""
    alike: dict[str, list[int]] = {}
    for row in bad:
        alike.setdefault(row.reason, []).append(row.line)
    for reason, lines in alike.items():
        if len(lines) == total > ALIKE:
            yield f"{path}: all {total:,} rows: {reason}"
            continue
        yield from (f"{path}:{line}: {reason}" for line in lines[:ALIKE])
        if lines[ALIKE:]:
            yield f"{path}: … and {len(lines) - ALIKE:,} more rows, for the same reason"


def load(spec: str, keys: Keys, *, needs_label: bool = False) -> PromptFile:
    """Reads a whole file; bad rows are collected, not raised.

    Args:
        spec: path, perhaps with a slice.
        needs_label: whether a row without a label is bad, unless it names a grader that does without.

    Raises:
        UserError: there is no such file.
    """
    path, start, stop = split_spec(spec)
    digest = hashlib.sha256()
    rows: list[Row] = []
    bad: list[BadRow] = []
    with _no_garbage_collection():
        for line, content in _selected(path, start, stop):
            digest.update(content + b"\n")
            row = parse_row(line, content, keys, needs_label=needs_label)
            if isinstance(row, Row):
                rows.append(row)
            else:
                bad.append(row)
    return PromptFile(str(path), rows, bad, digest.hexdigest())


def split_spec(spec: str) -> tuple[Path, int | None, int | None]:
    """(path, start, stop) of ``FILE`` or ``FILE@[start:stop]``.

    Raises:
        UserError: there is no such file, or it is of a kind that cannot be read.
    """
    found = _SLICE.fullmatch(spec)
    path = Path(found["path"] if found else spec)
    if not path.is_file() and found is None and "@[" in spec:
        raise UserError(f"{spec}: a slice is FILE@[a:b], with whole numbers of up to 18 digits or none")
    if not path.is_file():
        raise UserError(f"{path}: there is no such file of prompts")
    if path.suffix == ".parquet":
        raise UserError(f"{path}: prompts are read from .jsonl files, not from .parquet")
    start, stop = (int(found[bound]) if found and found[bound] else None for bound in ("start", "stop"))
    return path, start, stop


def parse_row(line: int, content: bytes, keys: Keys, *, needs_label: bool = False) -> Row | BadRow:
    """The row in the bytes of one line."""
    try:
        record = json.loads(content.decode())
        if not isinstance(record, dict):
            raise _Bad(f"a row must be a JSON object, not {_kind(record)}")
        metadata = _metadata(record, keys)
        label = _label(record, keys, metadata, needs_label)
        row = Row(line, _prompt(record, keys), label, _kept(metadata, keys))
        if b"\\ud" in content or b"\\uD" in content:
            _check_characters(row, keys)
        return row
    except _Bad as bad:
        return BadRow(line, str(bad))
    except UnicodeDecodeError as error:
        return BadRow(line, f"not UTF-8 at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        return BadRow(line, f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; thousands of brackets
        return BadRow(line, f"not readable as JSON: {error}")


class _Bad(Exception):
    """Why a row is bad."""


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A million rows make no cycles, but looking for some takes as long as reading them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, bytes without white space around), without blank lines."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            content = (line.removeprefix(_BOM) if number == 1 else line).strip()
            if content:
                yield number, content


def _keys_at(path: Path, line: int) -> list[str]:
    """The keys of a row that was read before."""
    return sorted(next(json.loads(content) for number, content in _lines(path) if number == line))


def _selected(path: Path, start: int | None, stop: int | None) -> Iterable[tuple[int, bytes]]:
    if (start or 0) < 0 or (stop or 0) < 0:  # only then the number of rows must be known
        start, stop, _ = slice(start, stop).indices(sum(1 for _ in _lines(path)))
    return islice(_lines(path), start, stop)


def _prompt(record: dict[str, Any], keys: Keys) -> str | list[Message]:
    if keys.input not in record:
        raise _Bad(f"no key {keys.input!r} (--input-key), only {sorted(record)}")
    prompt = record[keys.input]
    if not isinstance(prompt, str | list):
        raise _Bad(f"{keys.input}: must be a text or a list of messages, not {_kind(prompt)}")
    if not prompt:
        raise _Bad(f"{keys.input}: is empty")
    if isinstance(prompt, list):
        for number, message in enumerate(prompt, 1):
            _check_message(f"{keys.input}: message {number}", message)
    return prompt


def half_character(text: str) -> str | None:
    """The first surrogate, as JSON writes it: it can name half of a character, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x}"
    return None


def _check_characters(row: Row, keys: Keys) -> None:
    for key, value in ((keys.input, row.prompt), (keys.label, row.label), (keys.metadata, row.metadata)):
        half = half_character(json.dumps(value, ensure_ascii=False))
        if half is not None:
            raise _Bad(f"{key}: {half} is half of a character")


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise _Bad(f"{where} must be an object with role and content, not {_kind(message)}")
    if not isinstance(message.get("role"), str):
        raise _Bad(f"{where} has no role")
    content = message.get("content")
    if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
        if "content" not in message:
            raise _Bad(f"{where} has no content, only {sorted(message)}")
        raise _Bad(f"{where}: content must be a text, not {_kind(content)}")
    if message.get("step_loss_mask", 1) not in (0, 1):
        raise _Bad(f"{where}: step_loss_mask must be 0 or 1, not {message['step_loss_mask']!r}")


def _metadata(record: dict[str, Any], keys: Keys) -> dict[str, Any]:
    """An object, or an object written as a JSON string, as the guide's own rows have it."""
    value = record.get(keys.metadata)
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise _Bad(f"{keys.metadata}: a text that is not JSON: {error}") from None
    if value is None or value == "":
        value = {}
    if not isinstance(value, dict):
        raise _Bad(f"{keys.metadata}: must be an object, not {_kind(value)}")
    if keys.tools in record and keys.tools not in value:
        value = {**value, keys.tools: record[keys.tools]}
    return value


def _kept(metadata: dict[str, Any], keys: Keys) -> dict[str, Any]:
    """As samples may have it: see ``vime.metadata``."""
    try:
        return checked(metadata, keys.metadata)
    except BadMetadata as error:
        raise _Bad(str(error)) from None


def _needs_label(metadata: dict[str, Any]) -> bool:
    """Whether the grader that the row names, or that of the run, compares with a label."""
    rm_type = metadata.get("rm_type")
    if rm_type is None:
        return True
    try:
        registry.check(str(rm_type), "metadata: rm_type")
    except UserError as error:
        raise _Bad(str(error)) from None
    return registry.needs_label(str(rm_type))


def _label(record: dict[str, Any], keys: Keys, metadata: dict[str, Any], needs_label: bool) -> str | None:
    needs_label = needs_label and _needs_label(metadata)
    if keys.label is None:
        if needs_label:
            raise _Bad("the reward needs a label; name its key by --label-key")
        return None
    raw = record.get(keys.label)
    label = _label_text(keys.label, raw)
    if needs_label and not (label or "").strip():
        what = "is missing" if keys.label not in record else f"is {_kind(raw)}" if raw is None else "is empty"
        raise _Bad(f"{keys.label}: {what}, but the reward needs it")
    if needs_label and isinstance(raw, dict | list) and label == json.dumps(raw, ensure_ascii=False):
        raise _Bad(f"{keys.label}: must be a text or a number for this reward, not {_kind(raw)}")
    if raw is not None and not isinstance(raw, str):
        metadata.setdefault("raw_label", raw)
    return label


def _label_text(key: str, raw: Any) -> str | None:
    """34 and ["34"] are "34"; true is "true"; what has more structure stays JSON, for custom rewards."""
    if isinstance(raw, list) and len(raw) == 1 and not isinstance(raw[0], dict | list):
        raw = raw[0]
    if raw is None or isinstance(raw, str):
        return raw
    if isinstance(raw, float) and not math.isfinite(raw):
        raise _Bad(f"{key}: must be finite, not {raw}")
    return json.dumps(raw, ensure_ascii=False)


def _kind(value: Any) -> str:
    """How JSON calls the kind of a value."""
    if value is None:
        return "null"
    kinds = {bool: "a truth value", int: "a number", float: "a number", str: "a text", list: "an array"}
    return kinds.get(type(value), "an object")
