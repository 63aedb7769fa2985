"""The weight plan: which tensors a sync carries, under which names, and where each lies in the buffer.

Both sides hold the same plan and compare it before any byte moves; a tensor that is missing, unknown or of another
shape or dtype is then an error that names it, instead of a hang or garbage. Nothing here imports torch: a plan can be
checked anywhere.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

ALIGNMENT = 256  # bytes; a tensor starts at a multiple, which suits every dtype and copy kernel

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int32": 4, "uint8": 1}
"""Bytes of one element, by torch's name of the dtype."""


class PlanMismatch(ValueError):
    """Two sides disagree about what a weight sync carries. The message names the first tensor that differs."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a plan. ``offset`` counts bytes from the start of the buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def end(self) -> int:
        """Where the next tensor begins."""
        return self.offset + _aligned(self.nbytes)

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype} {list(self.shape)})"


@dataclass(frozen=True)
class WeightPlan:
    """The tensors of a sync in the order in which they are sent, packed into one buffer without overlap."""

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, entries: Iterable[tuple[str, Sequence[int], str]]) -> WeightPlan:
        """Lays out (name, shape, dtype) entries one after the other.

        Raises:
            PlanMismatch: a name comes twice or a dtype is unknown.
        """
        tensors: list[TensorSpec] = []
        seen: set[str] = set()
        offset = 0
        for name, shape, dtype in entries:
            dtype = str(dtype).removeprefix("torch.")
            if name in seen:
                raise PlanMismatch(f"the plan has {name} twice")
            if dtype not in ITEM_BYTES:
                raise PlanMismatch(f"{name}: weights of dtype {dtype} cannot be sent, only {', '.join(ITEM_BYTES)}")
            spec = TensorSpec(name, tuple(shape), dtype, offset)
            seen.add(name)
            tensors.append(spec)
            offset = spec.end
        return cls(tuple(tensors))

    @functools.cached_property
    def total_bytes(self) -> int:
        last = self.tensors[-1] if self.tensors else None
        return last.end if last else 0

    @functools.cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.tensors}

    @functools.cached_property
    def digest(self) -> str:
        """Equal exactly for equal plans."""
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()[:32]

    def to_json(self) -> list[list[Any]]:
        """JSON values: [name, shape, dtype] in order; the layout follows from them."""
        return [[spec.name, list(spec.shape), spec.dtype] for spec in self.tensors]

    @classmethod
    def from_json(cls, values: Iterable[Sequence[Any]]) -> WeightPlan:
        return cls.of((name, shape, dtype) for name, shape, dtype in values)

    def check(self, other: WeightPlan) -> None:
        """Raises PlanMismatch naming the first difference, if there is one; ``self`` is what was expected."""
        for i, (mine, theirs) in enumerate(zip(self.tensors, other.tensors, strict=False)):
            if mine != theirs:
                raise PlanMismatch(f"tensor {i} of the plan is {theirs}, {mine} was expected")
        if len(self.tensors) != len(other.tensors):
            longer = max(self.tensors, other.tensors, key=len)
            extra = longer[min(len(self.tensors), len(other.tensors))]
            word = "lacks" if longer is self.tensors else "has the unexpected"
            raise PlanMismatch(f"the plan {word} tensor {extra}")

    def buckets(self, max_bytes: int) -> Iterator[tuple[int, int]]:
        """Ranges [first, last) of tensors which together have at most ``max_bytes``, or are one larger tensor."""
        first = 0
        for i, spec in enumerate(self.tensors):
            if i > first and spec.end - self.tensors[first].offset > max_bytes:
                yield first, i
                first = i
        if first < len(self.tensors):
            yield first, len(self.tensors)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
