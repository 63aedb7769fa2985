"""Moves a model's memory between the device and pinned host memory, so that trainer and engine can share a GPU.

Tensors stay where they are in Python: only the storage behind them is emptied and filled again, so views into buffers,
optimizer states and parameters all remain valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from vime.platform import current
from vime.training.optimizer_kind import optimizers_of

__all__ = ["Offloader", "Part", "optimizer_tensors"]

Part: TypeAlias = Literal["parameters", "rest"]
"""What the forward pass needs, and the rest: main weights, moments and gradients."""


class Offloader:
    """Of one rank. Does nothing on a CPU, where there is nowhere else to go.

    Host memory is taken the first time that something moves, and kept.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any) -> None:
        self._chunks, self._optimizer = chunks, optimizer
        self._host: dict[int, Tensor] = {}  # pinned copies, by the identity of the storage
        self._away: dict[Part, list[tuple[torch.UntypedStorage, int, Tensor | None]]] = {}

    def offload(self, part: Part) -> None:
        """Frees the device memory of that part; gradients are dropped, all else is copied. Idempotent."""
        if current().name == "cpu" or part in self._away:
            return
        kept, dropped = self._storages(part)
        moved: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []
        for storage in kept:
            host = self._host_memory(storage)
            host.copy_(_bytes_of(storage), non_blocking=True)
            moved.append((storage, storage.nbytes(), host))
        moved += [(storage, storage.nbytes(), None) for storage in dropped]
        current().synchronize()
        for storage, _, _ in moved:
            storage.resize_(0)
        current().release_cached_memory()
        self._away[part] = moved

    def onload(self, part: Part) -> None:
        """Brings that part back, with gradients of zero. Idempotent."""
        for storage, size, host in self._away.pop(part, []):
            storage.resize_(size)
            if host is None:
                _bytes_of(storage).zero_()
            else:
                _bytes_of(storage).copy_(host, non_blocking=True)
        current().synchronize()

    def _storages(self, part: Part) -> tuple[list[torch.UntypedStorage], list[torch.UntypedStorage]]:
        """What has to be kept, and what may be dropped."""
        parameters = [p for chunk in self._chunks for p in chunk.parameters()]
        if part == "parameters":
            return _distinct(p.data for p in parameters), []
        model = {p.data.untyped_storage().data_ptr() for p in parameters}
        kept = [s for s in _distinct(optimizer_tensors(self._optimizer)) if s.data_ptr() not in model]
        gradients = _distinct(p.main_grad for p in parameters if getattr(p, "main_grad", None) is not None)
        return kept, gradients

    def _host_memory(self, storage: torch.UntypedStorage) -> Tensor:
        host = self._host.get(storage._cdata)
        if host is None or len(host) != storage.nbytes():
            host = self._host[storage._cdata] = current().pinned(storage.nbytes())
        return host


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Main weights and moments."""
    for each in optimizers_of(optimizer):
        inner = each.optimizer
        for group in inner.param_groups:
            yield from (parameter.data for parameter in group["params"])
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _distinct(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Their storages on the device, each once."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.is_cuda and storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
