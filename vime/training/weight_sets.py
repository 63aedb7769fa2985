"""Named sets of weights for one model: the reference next to the actor, and actors of before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from vime.platform import current
from vime.training.weights_io import global_parameters

__all__ = ["WeightSets"]

ALIGNMENT = 256  # bytes


class WeightSets:
    """Copies of all parameters and saved buffers in host memory. ``use`` runs the model with one of them, so that the
    same code computes with both sets: where the weights are equal, so are the results, to the last bit.

    Swapping exchanges the storage behind each tensor and copies nothing on a CPU. On a GPU the set is on the device
    as long as it is in use; copies go through locked memory, one piece for each set, in the order of the device's
    stream: each pass waits for the weights that it reads, and no set is written over before it has been read.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._tensors = [tensor for chunk in chunks for tensor in global_parameters([chunk]).values()]
        self._sets: dict[str, Tensor] = {}  # uint8
        self._spare: list[Tensor] = []  # of sets that were dropped: to lock memory takes longer than to copy into it

    def __contains__(self, name: str) -> bool:
        return name in self._sets

    def keep(self, name: str) -> None:
        """Copies the present weights under that name, over those that it had.

        Raises:
            UserError: the machine has not that much memory.
        """
        memory = self._sets.pop(name, None)
        if memory is None:
            memory = self._spare.pop() if self._spare else self._made()
        for tensor, kept in zip(self._tensors, self._parts(memory), strict=True):
            kept.copy_(tensor.detach(), non_blocking=True)
        current().synchronize()
        self._sets[name] = memory

    def drop(self, name: str) -> None:
        """Leaves that set's memory to the next one."""
        self._spare.append(self._sets.pop(name))

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """The model has the weights of that set inside the block, and its own afterwards."""
        own = [tensor.data for tensor in self._tensors]
        try:
            for tensor, weights in zip(self._tensors, self._parts(self._sets[name]), strict=True):
                tensor.data = weights.to(tensor.device, non_blocking=True)
            yield
        finally:
            for tensor, data in zip(self._tensors, own, strict=True):
                tensor.data = data

    def _made(self) -> Tensor:
        return current().pinned(sum(_aligned(tensor.nbytes) for tensor in self._tensors))

    def _parts(self, memory: Tensor) -> Iterator[Tensor]:
        """The place of each tensor in the memory of a set, with its shape and dtype."""
        begin = 0
        for tensor in self._tensors:
            yield memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            begin += _aligned(tensor.nbytes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
