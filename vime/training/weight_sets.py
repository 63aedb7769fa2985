"""Named sets of weights for one model: the reference next to the actor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["WeightSets"]


class WeightSets:
    """Copies of all parameters in host memory. ``use`` runs the model with one of them, so that the same code computes
    with both sets: where the weights are equal, so are the results, to the last bit.

    Swapping exchanges the storage behind each parameter and copies nothing on a CPU. On a GPU the set is on the device
    as long as it is in use.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._parameters: list[torch.nn.Parameter] = [p for chunk in chunks for p in chunk.parameters()]
        self._sets: dict[str, list[Tensor]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._sets

    def keep(self, name: str) -> None:
        """Copies the present weights under that name."""
        self._sets[name] = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """The model has the weights of that set inside the block, and its own afterwards."""
        own = [parameter.data for parameter in self._parameters]
        try:
            for parameter, weights in zip(self._parameters, self._sets[name], strict=True):
                parameter.data = weights.to(parameter.device)
            yield
        finally:
            for parameter, data in zip(self._parameters, own, strict=True):
                parameter.data = data
