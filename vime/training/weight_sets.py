"""Named sets of weights for one model: the reference next to the actor, and actors of before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from vime.training.weights_io import global_parameters

__all__ = ["WeightSets"]


class WeightSets:
    """Copies of all parameters and saved buffers in host memory. ``use`` runs the model with one of them, so that the
    same code computes with both sets: where the weights are equal, so are the results, to the last bit.

    Swapping exchanges the storage behind each tensor and copies nothing on a CPU. On a GPU the set is on the device
    as long as it is in use.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._tensors = [tensor for chunk in chunks for tensor in global_parameters([chunk]).values()]
        self._sets: dict[str, list[Tensor]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._sets

    def keep(self, name: str) -> None:
        """Copies the present weights under that name."""
        self._sets[name] = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors]

    def drop(self, name: str) -> None:
        """Frees that set."""
        del self._sets[name]

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """The model has the weights of that set inside the block, and its own afterwards."""
        own = [tensor.data for tensor in self._tensors]
        try:
            for tensor, weights in zip(self._tensors, self._sets[name], strict=True):
                tensor.data = weights.to(tensor.device)
            yield
        finally:
            for tensor, data in zip(self._tensors, own, strict=True):
                tensor.data = data
