"""Moves a model's memory between the device and pinned host memory, so that trainer and engine can share a GPU.

Tensors stay where they are in Python: only the storage behind them is emptied and filled again, so views into buffers,
optimizer states and parameters all remain valid. Copies run beside whatever else the device does: what a model needs in
its optimizer step alone arrives during the passes before, and leaves while engines load weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from vime.platform import current
from vime.training.optimizer_kind import optimizers_of

__all__ = ["Offloader", "Part", "optimizer_tensors"]

Part: TypeAlias = Literal["parameters", "rest"]
"""What the forward pass needs, and the rest: main weights, moments and gradients."""


PIECE_BYTES = 32 << 20  # half a millisecond


class Offloader:
    """Of one rank. Does nothing on a CPU, where there is nowhere else to go.

    Host memory is taken the first time that something moves, and kept.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any) -> None:
        self._chunks, self._optimizer = chunks, optimizer
        self._host: dict[int, Tensor] = {}  # pinned copies, by the identity of the storage
        self._leaving: dict[Part, list[_Moved]] = {}  # copied, or being so, and still on the device
        self._away: dict[Part, list[_Moved]] = {}
        self._stream: Any = None if current().name == "cpu" else torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def begin_offload(self, part: Part) -> None:
        """Starts to copy that part, which must not change any more, and drops gradients. Idempotent."""
        if self._stream is None or part in self._leaving or part in self._away:
            return
        self.arrive()
        kept, dropped = self._storages(part)
        moved = [_Moved(storage, storage.nbytes(), self._host_memory(storage)) for storage in kept]
        self._leaving[part] = [*moved, *(_Moved(storage, storage.nbytes(), None) for storage in dropped)]
        _empty(dropped)  # before: to free memory is to wait for all that the device does
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for each in moved:
                assert each.host is not None
                _copy(_bytes_of(each.storage), each.host)

    def offload(self, part: Part) -> None:
        """Frees the device memory of that part, once its copy is complete. Idempotent."""
        self.begin_offload(part)
        if part in self._leaving:
            self._stream.synchronize()
            self._away[part] = self._leaving.pop(part)
            _empty(each.storage for each in self._away[part])

    def onload(self, part: Part) -> None:
        """Brings that part back, with gradients of zero. Parameters are there afterwards; before anything else touches
        the rest, it must ``arrive``. Idempotent."""
        moved = [*self._leaving.pop(part, []), *self._away.pop(part, [])]
        gone = [each for each in moved if each.storage.nbytes() != each.size]
        if self._stream is None or not gone:
            return
        for each in gone:
            each.storage.resize_(each.size)
            if each.host is None:
                _bytes_of(each.storage).zero_()
        self._stream.wait_stream(torch.cuda.current_stream())  # who had the memory before may still work with it
        with torch.cuda.stream(self._stream):
            for each in gone:
                if each.host is not None:
                    _copy(each.host, _bytes_of(each.storage))
        if part == "parameters":
            self.arrive()

    def arrive(self) -> None:
        """What is computed from here on waits for copies that are under way."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

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


class _Moved(NamedTuple):
    storage: torch.UntypedStorage
    size: int  # bytes
    host: Tensor | None  # None: dropped, it comes back as zeros


def _copy(source: Tensor, target: Tensor) -> None:
    """In pieces: whatever else is copied in the same direction waits for the piece under way, not for all."""
    for begin in range(0, len(source), PIECE_BYTES):
        piece = slice(begin, begin + PIECE_BYTES)
        target[piece].copy_(source[piece], non_blocking=True)


def _empty(storages: Iterable[torch.UntypedStorage]) -> None:
    """Gives their memory back to everybody."""
    for storage in storages:
        storage.resize_(0)
    current().release_cached_memory()


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
