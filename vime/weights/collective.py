"""A process group for one thing: rank 0, the trainer's, broadcasts bytes to processes of engines.

It stands beside torch's default groups, of which both sides have one already. NCCL carries the bytes between GPUs, gloo
between CPUs.
"""

from __future__ import annotations

import atexit
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vime.platform import current

__all__ = ["Collective", "TransferFailed", "TransferTimeout", "Transmission"]

T = TypeVar("T")

POLL_S = 2e-4
CHECK_S = 0.05  # how often a waiting process looks whether the others still live


EXIT_S = 5.0  # how long a process that ends waits for groups that it has left

_abandoned: set[threading.Thread] = set()


class TransferFailed(RuntimeError):
    """An operation of the group failed, as torch says it. Other errors of whoever takes part are not this."""


class TransferTimeout(TransferFailed):
    """An operation did not end in time."""


class Transmission:
    """One broadcast under way. ``data`` must not be touched until ``wait`` has returned; then nothing here holds it."""

    def __init__(self, work: Any, data: Tensor, what: str) -> None:
        self._work, self._data, self._what = work, data, what

    @property
    def is_over(self) -> bool:
        return self._work is None

    def wait(self, *, timeout_s: float, check: Callable[[], None]) -> Tensor:
        """Returns the data once it is there. Only once.

        Args:
            check: called now and then, and in the end; what it raises ends the waiting.

        Raises:
            TransferTimeout: it took longer than ``timeout_s``.
            TransferFailed: the operation failed.
        """
        begin = checked = time.monotonic()
        while not self._work.is_completed():
            now = time.monotonic()
            if now - begin > timeout_s:
                raise TransferTimeout(f"{self._what}: not there after {timeout_s:g} s")
            if now - checked > CHECK_S:
                check()
                checked = now
            time.sleep(POLL_S)
        try:
            # gloo's wait raises what went wrong. NCCL's has the device's own queue wait and raises nothing: a failed
            # operation counts as completed, and what became of it cannot be asked in torch 2.11. So whoever sends
            # states checksums, and whoever receives compares.
            self._work.wait()
        except RuntimeError as error:
            raise TransferFailed(str(error)) from None
        check()  # a group that somebody left may have ended the operation without any error
        data = self._data
        del self._data
        self._work = None  # it holds the data too
        return data

    def drain(self) -> None:
        """Waits for an operation that nobody is interested in any more."""
        if self._work is not None:
            with contextlib.suppress(RuntimeError):
                self._work.wait()


class Collective:
    """One member of the group.

    Args:
        store: see ``open_store`` and ``join_store``.
        address: of this machine, for the others.
        timeout_s: after which an operation ends by itself. Whoever waits gives up earlier.
    """

    def __init__(self, store: Any, rank: int, size: int, *, address: str, timeout_s: float) -> None:
        self._group: Any = current().broadcast_group(store, rank, size, address=address, timeout_s=timeout_s)
        self._store = store
        self._under_way: list[Transmission] = []

    @classmethod
    def meet(
        cls, store: Any, rank: int, size: int, *, address: str, timeout_s: float, check: Callable[[], None]
    ) -> Collective:
        """Makes a member. Gloo waits for all others meanwhile, and ``check`` may end the waiting by raising."""

        def make() -> Collective:
            return cls(store, rank, size, address=address, timeout_s=timeout_s)

        if current().name != "cpu":  # NCCL waits for nobody before the first operation
            return make()
        return _awaited(make, "the group", timeout_s=timeout_s, check=check, late=lambda made: made.abandon())

    def first_broadcast(self, data: Tensor, what: str, *, timeout_s: float, check: Callable[[], None]) -> Transmission:
        """``broadcast`` as the first operation of all, in which NCCL makes the connections.

        It waits there for all others, for ever and without looking at anything. If the waiting ends before, whoever
        has the group must leave it.

        Args:
            check: called now and then; what it raises ends the waiting.

        Raises:
            TransferTimeout: not all came within ``timeout_s``.
            TransferFailed: the operation failed.
        """
        group = self._group
        # another thread has another stream, which would not wait for what this one's has yet to do with the memory
        current().synchronize()
        return _awaited(
            lambda: self.broadcast(data, what),
            what,
            timeout_s=timeout_s,
            check=check,
            late=lambda _: group.abort(),  # once more: there was no connection to end the first time
        )

    def broadcast(self, data: Tensor, what: str) -> Transmission:
        """Sends ``data`` (rank 0) or fills it (the others), without waiting. Raises TransferFailed."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        try:
            transmission = Transmission(self._group.broadcast([data], options), data, what)
        except RuntimeError as error:
            raise TransferFailed(f"{what}: {error}") from None
        self._under_way = [*(each for each in self._under_way if not each.is_over), transmission]
        return transmission

    def abandon(self) -> None:
        """Leaves the group without waiting, whatever is under way; the others must be told in another way.

        Gloo cannot take an operation back: it ends when the other side leaves or its time is up, and a thread keeps the
        memory until then.
        """
        group, under_way, store = self._group, self._under_way, self._store
        self._group = None
        group.abort()

        def dispose() -> None:
            nonlocal group, store
            for transmission in under_way:
                transmission.drain()
            under_way.clear()
            del group, store
            _abandoned.discard(threading.current_thread())

        thread = threading.Thread(target=dispose, daemon=True, name="vime-abandoned-group")
        _abandoned.add(thread)
        thread.start()


def _awaited(
    work: Callable[[], T], what: str, *, timeout_s: float, check: Callable[[], None], late: Callable[[T], None]
) -> T:
    """Does what waits for others in a thread, which is left alone when ``check`` raises or the time is up.

    Args:
        late: told what came of it when nobody waits any more.
    """
    done: Future[T] = Future()
    device = current().device()

    def do() -> None:
        try:
            current().enter(device)
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=do, daemon=True, name="vime-meeting-group").start()
    deadline = time.monotonic() + timeout_s
    try:
        while not wait([done], CHECK_S).done:
            check()
            if time.monotonic() > deadline:
                raise TransferTimeout(f"{what}: not there after {timeout_s:g} s")
    except BaseException:
        done.add_done_callback(lambda done: None if done.exception() else late(done.result()))
        raise
    return done.result()


@atexit.register
def _await_abandoned() -> None:
    """A thread that the interpreter stops on its way out of torch would abort the process."""
    deadline = time.monotonic() + EXIT_S
    for thread in list(_abandoned):
        thread.join(max(0.0, deadline - time.monotonic()))


def open_store(address: str, port: int = 0, *, timeout_s: float) -> tuple[Any, int]:
    """Where the members find each other, and its port. It listens at ``address`` only; torch's own would everywhere."""
    listener = socket.create_server((address, port))
    chosen: int = listener.getsockname()[1]
    store = _store(address, chosen, timeout_s, is_master=True, master_listen_fd=listener.detach())
    return store, chosen


def join_store(address: str, port: int, *, timeout_s: float) -> Any:
    return _store(address, port, timeout_s, is_master=False)


def _store(address: str, port: int, timeout_s: float, **options: Any) -> Any:
    store_class: Any = getattr(dist, "TCPStore")  # noqa: B009  typed nowhere
    return store_class(address, port, wait_for_workers=False, timeout=timedelta(seconds=timeout_s), **options)


def empty_bytes(size: int) -> Tensor:
    """Memory on this process's device."""
    return torch.empty(size, dtype=torch.uint8, device=current().device())
