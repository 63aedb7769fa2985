"""What a rank holds in memory, by what it is for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from vime.training.offload import optimizer_tensors

__all__ = ["held_bytes"]


def held_bytes(chunks: Sequence[Any], optimizer: Any) -> dict[str, int]:
    """Bytes of ``parameters``, ``gradients`` and ``optimizer`` (main weights and moments), each storage once.

    What was moved to the host counts 0.
    """
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    gradients = [each.main_grad for each in parameters if getattr(each, "main_grad", None) is not None]
    seen: set[int] = set()
    return {
        "parameters": _bytes((each.data for each in parameters), seen),
        "gradients": _bytes(gradients, seen),
        "optimizer": _bytes(optimizer_tensors(optimizer), seen),
    }


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Of storages that are not among those ``seen``, which grow by them."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
