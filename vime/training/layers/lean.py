"""Cheap outputs are computed again in the backward pass instead of being kept.

A norm or an activation in front of a linear layer is one pass over memory, from tensors that are kept anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["cheap", "lean"]


def cheap(output: Tensor, again: Callable[[], Tensor]) -> Tensor:
    """Notes how ``output`` could be computed again, to the last bit."""
    output.again = again  # type: ignore[attr-defined]
    return output


@contextmanager
def lean(tensor: Tensor) -> Iterator[None]:
    """Inside the block, whoever keeps a cheap ``tensor`` for its backward pass keeps instead how to compute it."""
    again: Callable[[], Tensor] | None = getattr(tensor, "again", None)
    if again is None or not torch.is_grad_enabled():
        yield
        return
    place, shape = tensor.data_ptr(), tensor.shape

    def pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
        return again if saved.data_ptr() == place and saved.shape == shape else saved

    def unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return packed()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
