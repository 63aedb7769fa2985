"""What a function changed of the values that it got."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any


def changes(before: Any, after: Any, name: str = "") -> Iterator[str]:
    """The places where two values differ: "samples[2].tokens". NaN equals itself."""
    if type(before) is not type(after):
        yield name
    elif dataclasses.is_dataclass(before):
        for field in dataclasses.fields(before):
            yield from changes(getattr(before, field.name), getattr(after, field.name), f"{name}.{field.name}")
    elif isinstance(before, Mapping):
        for key in before.keys() | after.keys():
            inner = f"{name}[{key!r}]" if name else str(key)
            if key not in before or key not in after:
                yield inner
            else:
                yield from changes(before[key], after[key], inner)
    elif isinstance(before, list | tuple):
        if len(before) != len(after):
            yield name
            return
        found = [change for i, pair in enumerate(zip(before, after, strict=True)) for change in _item(*pair, name, i)]
        yield from [name] if found and not any(dataclasses.is_dataclass(item) for item in before) else found
    elif not _equal(before, after):
        yield name


def _item(before: Any, after: Any, name: str, place: int) -> Iterator[str]:
    return changes(before, after, f"{name}[{place}]")


def _equal(before: Any, after: Any) -> bool:
    if hasattr(before, "detach"):  # a tensor
        return before.shape == after.shape and bool(((before == after) | ((before != before) & (after != after))).all())
    if not hasattr(before, "__dict__"):
        return bool(before == after or (before != before and after != after))
    return True  # an object of which we know nothing was copied: whether it is the same cannot be told
