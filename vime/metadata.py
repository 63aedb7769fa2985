"""What the metadata of a sample may be, decided in one place: what JSON can hold, of bounded depth and size.

It is checked where it enters: rows of prompts, samples of a custom source, what generate functions, hooks, rewards and
agents make of it. Behind that it can be copied, sent to graders, kept in checkpoints and written down.

* Keys are texts; values are texts, numbers, truth values, null, and lists and dicts of these. What has ``tolist``
  (NumPy, tensors) becomes numbers and lists, a tuple becomes a list.
* A number that is not finite becomes null, which is what JSON has for it.
* ``multi_turn`` is vime's own key: what is known of a sample of several turns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["MAX_BITS", "MAX_CHARS", "MAX_DEPTH", "MULTI_TURN", "BadMetadata", "checked", "multi_turn_of", "without_bad"]

MAX_DEPTH = 100
"""How deep values may be nested; a value that holds itself is deeper."""

MAX_CHARS = 64 << 20
"""Of all texts together; any other value counts as eight."""

MAX_BITS = 4096
"""Of an integer; Python writes none of over 4,300 digits."""

MULTI_TURN = "multi_turn"


TOOLS = ("tool_calls", "tool_errors", "tool_timeouts", "tool_seconds")
"""What the record of a sample of several turns counts."""


class BadMetadata(ValueError):
    """Metadata that cannot be kept. The message begins with the value: ``metadata['a'][2] is …``."""


def checked(metadata: Any, name: str = "metadata") -> dict[str, Any]:
    """The metadata as plain values, in containers of its own.

    Args:
        name: of what it is, for messages.

    Raises:
        BadMetadata: it is something else than the module says.
    """
    if not isinstance(metadata, Mapping):
        raise BadMetadata(f"{name} is {_kind(metadata)}; it must be a dict")
    try:
        plain: dict[str, Any] = _Walk().plain(metadata, 0)
    except _Bad as bad:
        raise BadMetadata(f"{name}{bad.place()} {bad.what}") from None
    if MULTI_TURN in plain and not _is_record(plain[MULTI_TURN]):
        raise BadMetadata(f"{name}[{MULTI_TURN!r}] is vime's own, for samples of several turns; name yours otherwise")
    return plain


def without_bad(metadata: Any) -> dict[str, Any]:
    """What of it can be kept, by its keys."""
    kept: dict[str, Any] = {}
    for key, value in metadata.items() if isinstance(metadata, dict) else ():
        try:
            kept |= checked({key: value})
        except BadMetadata:
            continue
    return kept


def multi_turn_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a sample of several turns; nothing of another, whatever it has under that key."""
    record = metadata.get(MULTI_TURN)
    return record if isinstance(record, dict) and _is_record(record) else {}


def _is_record(value: Any) -> bool:
    """``{"turns": [[begin, end], …], "answer": …}`` and counts of tools, of which each may be left out."""
    if not isinstance(value, dict) or not all(isinstance(value.get(name, 0), int | float) for name in TOOLS):
        return False
    turns, answer = value.get("turns", []), value.get("answer", "")
    pairs = isinstance(turns, list) and all(
        isinstance(turn, list | tuple) and len(turn) == 2 and all(type(end) is int for end in turn) for turn in turns
    )
    return pairs and isinstance(answer, str | None)


class _Bad(Exception):
    """What is wrong with a value; on its way out it learns where that is."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.keys: list[str | int] = []

    def place(self) -> str:
        keys = [f"[{key!r}]" for key in reversed(self.keys)]
        return "".join(keys if len(keys) <= 6 else [*keys[:5], "…"])[:200]


class _Walk:
    """One walk over metadata; it counts what it has seen."""

    def __init__(self) -> None:
        self._left = MAX_CHARS

    def plain(self, value: Any, depth: int) -> Any:
        kind = type(value)
        self._spend(len(value) if kind is str else 8)
        if kind is str or kind is bool or value is None:
            return value
        if kind is float:
            return value if math.isfinite(value) else None
        if kind is int:
            return _integer(value)
        if depth > MAX_DEPTH:
            raise _Bad(f"is nested more than {MAX_DEPTH} deep, or holds itself")
        if isinstance(value, Mapping):
            return {_key(key): self._at(key, item, depth) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._at(place, item, depth) for place, item in enumerate(value)]
        return self._other(value, depth)

    def _other(self, value: Any, depth: int) -> Any:
        """Of a kind of its own: a subclass, or an array."""
        for plain in (str, float):
            if isinstance(value, plain):
                return self.plain(plain(value), depth)
        if isinstance(value, int):
            return _integer(int(value))
        if hasattr(value, "tolist") and not isinstance(value, type):
            return self.plain(value.tolist(), depth + 1)
        raise _Bad(f"is {_kind(value)}; it must be what JSON can hold")

    def _at(self, key: Any, item: Any, depth: int) -> Any:
        try:
            return self.plain(item, depth + 1)
        except _Bad as bad:
            bad.keys.append(key)
            raise

    def _spend(self, chars: int) -> None:
        self._left -= chars
        if self._left < 0:
            raise _Bad(f"makes it larger than {MAX_CHARS >> 20} MiB")


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise _Bad(f"has {str(key)[:40]!r} ({type(key).__name__}) as a key; keys must be texts")
    return str(key)


def _integer(value: int) -> int:
    if value.bit_length() > MAX_BITS:
        raise _Bad(f"is an integer of {value.bit_length()} bits; it must have at most {MAX_BITS}")
    return value


def _kind(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"
