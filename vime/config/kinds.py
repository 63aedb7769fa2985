"""Kinds of flag values: how many words a flag takes, and how a word or a YAML value becomes a Python value.

A converter gets what was written (a word of the command line, or whatever YAML read) and raises ``ValueError`` when
that is not what the kind expects. Words and YAML values go through the same converter: YAML reads ``1e-6`` as a string,
and it must mean the same as on the command line.
"""

from __future__ import annotations

import enum
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Converter = Callable[[Any], Any]


class Words(enum.Enum):
    """How many words follow the flag."""

    NONE = "none"  # a switch: --colocate, --no-colocate
    ONE = "one"
    MANY = "many"  # up to the next flag


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a flag takes."""

    expected: str  # completes "expects …"
    words: Words = Words.ONE
    convert: Converter
    appends: bool = False  # a repeated flag adds to the earlier ones; else the last one wins
    optional: bool = False  # YAML's null is allowed
    instead: Mapping[str, str] = field(default_factory=dict)  # why values that are usual elsewhere cannot be given


def to_bool(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    words = {"true": True, "false": False}
    if isinstance(raw, str) and raw.lower() in words:
        return words[raw.lower()]
    raise ValueError(raw)


def to_int(raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int | str):
        raise ValueError(raw)
    return int(raw)


def to_float(raw: Any) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError(raw)
    value = float(raw)
    if not math.isfinite(value):
        raise ValueError(raw)
    return value


def to_str(raw: Any) -> str:
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise ValueError(raw)
    return str(raw)


def to_json(raw: Any) -> Any:
    """An object or list; in YAML it may stand as it is."""
    value = json.loads(raw) if isinstance(raw, str) else raw
    if not isinstance(value, dict | list):
        raise ValueError(raw)
    return value


def to_json_or_str(raw: Any) -> Any:
    """JSON where it is JSON (an object, a list, a number), else the text as it is."""
    if not isinstance(raw, str):
        return raw
    try:
        return json.loads(raw)
    except ValueError:
        return raw


def to_layer_pattern(raw: Any) -> int | list[int]:
    """Megatron-LM's two ways to say which layers have experts: every so many, or 1 and 0 a layer: [0]*3+[1]*58."""
    if isinstance(raw, list):
        return [to_int(each) for each in raw]
    if not isinstance(raw, str) or "[" not in raw:
        return to_int(raw)
    layers: list[int] = []
    for term in re.sub(r"[\s()]", "", raw).split("+"):
        match = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d+))?", term)
        if match is None:
            raise ValueError(raw)
        layers += [int(each) for each in match[1].split(",")] * int(match[2] or 1)
    return layers


def to_human_int(raw: Any) -> int | str:
    """vLLM's 4k, 4K, 1.5m and auto stay as written, since vLLM reads them again; a plain number is one."""
    text = to_str(raw)
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if not re.fullmatch(r"auto|\d+(\.\d+)?[kmgt]|\d+[KMGT]", text):
        raise ValueError(raw)
    return text


def human_int(value: int | str | None) -> int | None:
    """The number behind what ``to_human_int`` let pass; None where vLLM is to find it (auto, -1, not given).

    As in vLLM 0.32: k, m, g, t are powers of 1000 and may follow a decimal; K, M, G, T are powers of 1024.
    """
    if value is None or value in ("auto", -1):
        return None
    if isinstance(value, int):
        return value
    number, suffix = value[:-1], value[-1]
    base = 1000 if suffix.islower() else 1024
    return int(float(number) * base ** ("kmgt".index(suffix.lower()) + 1))


def to_json_object(raw: Any) -> dict[str, Any]:
    value = to_json(raw)
    if not isinstance(value, dict):
        raise ValueError(raw)
    return value


def to_pairs(raw: Any) -> tuple[tuple[str, str], ...]:
    """``n1 p1 n2 p2``; from YAML also a mapping, or a list of [name, path]."""
    if isinstance(raw, Mapping):
        return tuple((to_str(name), to_str(path)) for name, path in raw.items())
    items: list[Any] = raw.split() if isinstance(raw, str) else list(raw)
    if items and all(isinstance(item, list) and len(item) == 2 for item in items):
        return tuple((to_str(pair[0]), to_str(pair[1])) for pair in items)
    if len(items) % 2:
        raise ValueError(raw)
    words = [to_str(item) for item in items]
    return tuple(zip(words[::2], words[1::2], strict=True))


def list_of(item: Kind) -> Kind:
    def convert(raw: Any) -> tuple[Any, ...]:
        items = raw if isinstance(raw, list | tuple) else [raw]
        return tuple(item.convert(each) for each in items)

    return Kind(expected=f"one or more values, each {item.expected}", words=Words.MANY, convert=convert)


def choice(choices: tuple[Any, ...]) -> Kind:
    def convert(raw: Any) -> Any:
        for known in choices:
            if str(raw) == str(known):
                return known
        raise ValueError(raw)

    return Kind(expected="one of " + ", ".join(map(str, choices)), convert=convert)


SWITCH = Kind(expected="true or false", words=Words.NONE, convert=to_bool)
INT = Kind(expected="a whole number", convert=to_int)
FLOAT = Kind(expected="a number", convert=to_float)
STR = Kind(expected="a text", convert=to_str)
JSON = Kind(expected="JSON, an object or a list, e.g. '{\"key\": 1}'", convert=to_json)
JSON_OBJECT = Kind(expected="a JSON object, e.g. '{\"key\": 1}'", convert=to_json_object)
PAIRS = Kind(expected="pairs of a name and a path", words=Words.MANY, convert=to_pairs, appends=True)

HUMAN_INT = Kind(expected="a whole number, perhaps as 4k or 1.5m", convert=to_human_int)
LAYER_PATTERN = Kind(expected="a whole number, or a list like [0]*3+[1]*58", convert=to_layer_pattern)
JSON_OR_STR = Kind(expected="a text or JSON", convert=to_json_or_str)

BY_NAME: dict[str, Kind] = {
    "switch": SWITCH,
    "int": INT,
    "float": FLOAT,
    "str": STR,
    "json": JSON,
    "json_or_str": JSON_OR_STR,
    "human_int": HUMAN_INT,
}
"""Kinds by the names that the manifests of foreign flags use."""

_SIMPLE: dict[Any, Kind] = {bool: SWITCH, int: INT, float: FLOAT, str: STR}


def kind_of(hint: Any, choices: tuple[str, ...] = ()) -> Kind:
    """The kind for an annotation such as ``int | None``, ``Literal["k1", "k2"]`` or ``tuple[str, ...]``."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        inner = [each for each in typing.get_args(hint) if each is not type(None)]
        assert len(inner) == 1, f"a flag has one type, not {hint}"
        return replace(kind_of(inner[0], choices), optional=True)
    if choices:
        return choice(choices)
    if typing.get_origin(hint) is Literal:
        return choice(typing.get_args(hint))
    if hint == tuple[tuple[str, str], ...]:
        return PAIRS
    if typing.get_origin(hint) is tuple:
        return list_of(_SIMPLE[typing.get_args(hint)[0]])
    return JSON_OBJECT if typing.get_origin(hint) is Mapping else _SIMPLE[hint]
