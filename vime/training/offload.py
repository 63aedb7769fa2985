"""Moves a model's memory between the device and pinned host memory, so that trainer and engine can share a GPU.

Tensors stay where they are in Python: only the storage behind them is emptied and filled again, so views into buffers,
optimizer states and parameters all remain valid. Copies run beside whatever else the device does: what a model needs in
its optimizer step alone arrives during the passes before, and leaves while engines load weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from vime.errors import UserError
from vime.platform import current
from vime.training.optimizer_kind import optimizers_of

__all__ = ["Offloader", "Part", "optimizer_tensors"]

Part: TypeAlias = Literal["parameters", "rest"]
"""What the forward pass needs, and the rest: main weights, moments and gradients."""
PARTS: tuple[Part, ...] = ("parameters", "rest")

PIECE_BYTES = 32 << 20
"""What is copied at a time: 0.6 ms. Other copies in the same direction wait for the pieces under way, not for all."""
PIECES_UNDER_WAY = 2
SLAB_BYTES = 1 << 30
"""Of host memory that nobody has prepared."""


class Offloader:
    """Of one rank. Does nothing on a CPU, where there is nowhere else to go.

    Host memory is taken the first time that something moves, or by ``prepare``, and kept.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any) -> None:
        self._chunks, self._optimizer = chunks, optimizer
        self._host = _HostMemory()
        self._leaving: dict[Part, list[_Moved]] = {}  # copied, or being so, and still on the device
        self._away: dict[Part, list[_Moved]] = {}
        self._dropped: list[_Moved] = []  # gradients, which come back as zeros
        self._coming: list[_Moved] = []  # has its device memory again, and nothing in it yet
        self._copies = None if current().name == "cpu" else _Copies()

    def prepare(self) -> None:
        """Begins to make the host memory, beside whatever else happens: of a large model that takes many seconds."""
        if self._copies is not None:
            held = [storage.nbytes() for part in PARTS for storage in self._storages(part)]
            sizes = [*held, *_moments_to_come(self._optimizer)]
            self._copies.beside(lambda: self._host.make(sizes))

    def shed(self) -> None:
        """Drops gradients, and gives the memory that nothing uses back to everybody. Idempotent."""
        if self._copies is None or self._dropped:
            return
        self._copies.arrive()
        self._dropped = [_Moved(storage, storage.nbytes(), torch.empty(0)) for storage in self._gradients()]
        _empty(each.storage for each in self._dropped)

    def begin_offload(self, part: Part) -> None:
        """Starts to copy that part, which must not change any more, and drops gradients. Idempotent."""
        if self._copies is None or part in self._leaving or part in self._away:
            return
        self.fetch()
        self.shed()  # before: to free memory is to wait for all that the device does
        storages = self._storages(part)
        moved = [_Moved(storage, storage.nbytes(), self._host.of(storage)) for storage in storages]
        self._leaving[part] = moved
        self._copies.start((_bytes_of(each.storage), each.host) for each in moved)

    def offload(self, part: Part) -> None:
        """Frees the device memory of that part, once its copy is complete. Idempotent."""
        self.begin_offload(part)
        if self._copies is not None and part in self._leaving:
            self._copies.finish()
            self._away[part] = self._leaving.pop(part)
            _empty(each.storage for each in self._away[part])

    def onload(self, part: Part) -> None:
        """Brings that part back, with gradients of zero. Parameters are there afterwards; the rest waits for ``fetch``,
        and before anything touches it, it must ``arrive``. Idempotent.

        Raises:
            UserError: the device has no room for it; it is still in host memory.
        """
        if self._copies is None:
            return
        self._leaving.pop(part, None)  # it is still here
        if part == "rest":
            _fill(self._dropped, "gradients")
            for each in self._dropped:
                _bytes_of(each.storage).zero_()
            self._dropped = []
        gone = self._away.get(part, [])
        _fill(gone, "parameters" if part == "parameters" else "main weights and moments")
        self._away.pop(part, None)  # only now: until it has its memory, its only copy is on the host
        self._coming += gone
        if part == "parameters":
            self.arrive()

    def fetch(self) -> None:
        """Starts the copies of what comes back. Before, there is the whole bandwidth for what somebody waits for."""
        if self._copies is not None and self._coming:
            self._copies.start((each.host, _bytes_of(each.storage)) for each in self._coming)
            self._coming = []

    def arrive(self) -> None:
        """What is computed from here on waits for all that comes back."""
        if self._copies is not None:
            self.fetch()
            self._copies.arrive()

    def _storages(self, part: Part) -> list[torch.UntypedStorage]:
        """What has to be kept of that part."""
        parameters = _distinct(p.data for p in self._parameters())
        if part == "parameters":
            return parameters
        model = {storage.data_ptr() for storage in parameters}
        return [s for s in _distinct(optimizer_tensors(self._optimizer)) if s.data_ptr() not in model]

    def _gradients(self) -> list[torch.UntypedStorage]:
        return _distinct(p.main_grad for p in self._parameters() if getattr(p, "main_grad", None) is not None)

    def _parameters(self) -> Iterator[Any]:
        return (p for chunk in self._chunks for p in chunk.parameters())


class _Moved(NamedTuple):
    storage: torch.UntypedStorage
    size: int  # bytes
    host: Tensor  # empty if there is nothing to keep


class _HostMemory:
    """Locked memory for a copy of each storage, cut out of a few large pieces: a piece takes as long to lock as its
    bytes do, and the system bounds how many a process may have."""

    def __init__(self) -> None:
        self._of: dict[int, Tensor] = {}  # by the identity of the storage
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def make(self, sizes: Iterable[int]) -> None:
        """Room for so many storages of these sizes, which then need no more. What the machine says is free is not
        asked: the memory of some grows as it is used. Whether all ranks fit is judged before they start.

        Raises:
            UserError: the machine has not that much memory.
        """
        self._slab, self._used = current().pinned(sum(map(_aligned, sizes))), 0

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        host = self._of.get(storage._cdata)
        if host is None or len(host) != storage.nbytes():
            host = self._of[storage._cdata] = self._cut(storage.nbytes())
        return host

    def _cut(self, size: int) -> Tensor:
        if self._used + size > len(self._slab):
            self.make([max(size, SLAB_BYTES)])
        begin = self._used
        self._used += _aligned(size)
        return self._slab[begin : begin + size]


def _aligned(size: int) -> int:
    return -(-size // 256) * 256


class _Copies:
    """Copies one after the other on a stream of their own, by a thread: only so many may wait in the driver's queue,
    and whoever hands it one more waits, for a second if gigabytes are under way.
    """

    def __init__(self) -> None:
        device = torch.cuda.current_device()
        self._thread = ThreadPoolExecutor(1, "offload", initializer=torch.cuda.set_device, initargs=(device,))
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._under_way: list[Future[None]] = []

    def beside(self, work: Callable[[], None]) -> None:
        """In the thread, before the copies that are started later."""
        self._under_way.append(self._thread.submit(work))

    def start(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copies each first tensor into the second, after what the device has been given to do so far."""
        before = torch.cuda.current_stream().record_event()
        copies = list(pairs)
        self.beside(lambda: self._copy(before, copies))

    def _copy(self, before: torch.cuda.Event, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        under_way: deque[torch.cuda.Event] = deque()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(before)
            for source, target in pairs:
                for begin in range(0, len(source), PIECE_BYTES):
                    piece = slice(begin, begin + PIECE_BYTES)
                    target[piece].copy_(source[piece], non_blocking=True)
                    under_way.append(self._stream.record_event(torch.cuda.Event(blocking=True)))  # type: ignore[no-untyped-call]
                    if len(under_way) > PIECES_UNDER_WAY:
                        under_way.popleft().synchronize()

    def arrive(self) -> None:
        """All copies have been handed to the device, whose present stream waits for the last ones."""
        while self._under_way:
            self._under_way.pop(0).result()
        torch.cuda.current_stream().wait_stream(self._stream)

    def finish(self) -> None:
        """All copies are complete."""
        self.arrive()
        self._stream.synchronize()


def _empty(storages: Iterable[torch.UntypedStorage]) -> None:
    """Gives their memory back to everybody."""
    for storage in storages:
        storage.resize_(0)
    current().release_cached_memory()


def _fill(moved: Sequence[_Moved], what: str) -> None:
    """Takes device memory for all of them, or for none."""
    try:
        for each in moved:
            each.storage.resize_(each.size)
    except torch.OutOfMemoryError:
        _empty(each.storage for each in moved)
        total, free = sum(each.size for each in moved), current().free_bytes()
        raise UserError(
            f"{what} of {total / 2**30:.1f} GiB come back to a GPU that has {free / 2**30:.1f} GiB free: a smaller "
            "--vllm-gpu-memory-utilization leaves more beside engines"
        ) from None


def _moments_to_come(optimizer: Any) -> Iterator[int]:
    """Bytes of each moment that the first step will make; one is as large as what the optimizer changes."""
    for each in optimizers_of(optimizer):
        inner = each.optimizer
        for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
            if parameter.is_cuda and not inner.state.get(parameter):
                yield from (parameter.nbytes, parameter.nbytes)


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
