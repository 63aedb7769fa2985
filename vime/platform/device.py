"""The device that this process computes on, and the few verbs that differ from one kind of device to another."""

from __future__ import annotations

import datetime
import functools
import logging
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes import c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vime.errors import UserError
from vime.platform.cuda_driver import DriverError, call

logger = logging.getLogger(__name__)

__all__ = ["Platform", "current"]

REGISTER_READ_ONLY = 8  # CU_MEMHOSTREGISTER_READ_ONLY
TOUCHED_BYTES = 256 << 20
"""What one thread fills at a time while memory is made."""


@dataclass(frozen=True, slots=True)
class Platform:
    """One kind of device.

    Everything that a caller may want to know is an attribute here, named for what it means to the caller.
    """

    name: str  # "cpu" or "cuda"
    backend: str  # of torch.distributed
    segment_kernel: bool  # there is a fused attention kernel for packed segments (flash attention)
    fused_kernels: bool  # Triton kernels run here
    slice_elements: int  # float32 elements to work on at a time: few enough for a cache, enough to fill the device

    def device(self) -> torch.device:
        """The device that this process has claimed, or would work on if it claims none."""
        return torch.device("cpu") if self.name == "cpu" else torch.device("cuda", torch.cuda.current_device())

    def claim(self, *, local_rank: int, threads: int | None = None) -> torch.device:
        """Makes this process use its device, and ``threads`` CPU threads (default: OMP_NUM_THREADS, else torch's
        choice).

        Ray sets OMP_NUM_THREADS to 1 for every actor, so whoever places processes says how many threads each may have.
        """
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(threads)
            torch.set_num_threads(threads)
        if self.name == "cuda":
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
        return self.device()

    def enter(self, device: torch.device) -> None:
        """Has this thread use the process's device: every thread begins with the machine's first one."""
        if self.name == "cuda":
            torch.cuda.set_device(device)

    def synchronize(self) -> None:
        """Waits until the device has done what was queued, so that a clock read afterwards is right.

        Copies that run beside it in streams of their own are not waited for.
        """
        if self.name == "cuda":
            torch.cuda.current_stream().synchronize()

    def release_cached_memory(self) -> None:
        if self.name == "cuda":
            torch.cuda.empty_cache()

    def pin(self, data: Tensor, *, read_only: bool = False) -> bool:
        """Locks the memory of a CPU tensor in place, so that the device copies at full speed and beside other work.

        Returns whether it did; there is nothing to lock for on a CPU. Before the memory goes, ``unpin`` it: what is
        mapped at the same place afterwards would be taken for it, and copies to and from there fail.
        """
        if self.name == "cpu" or not len(data):
            return False
        flags = REGISTER_READ_ONLY if read_only else 0
        try:
            call("cuMemHostRegister_v2", c_void_p(data.data_ptr()), c_size_t(data.nbytes), flags)
        except DriverError as error:
            logger.warning("%.3g GB of host memory are not locked, so copies are slower: %s", data.nbytes / 1e9, error)
            return False
        _locked.add(data.data_ptr())
        return True

    def unpin(self, data: Tensor) -> None:
        """Ends ``pin``, once the device has done what was queued. Does nothing for memory that is not locked."""
        _unlock(data.data_ptr())

    def pinned(self, size: int) -> Tensor:
        """A uint8 tensor of ``size`` bytes that is locked in place for as long as it lives, if the system allows it.

        Its pages are made by many threads at once: the driver alone would take a second for 2 GB. They are large where
        the system has such: it takes as long to lock a page of 2 MiB as one of 4 KiB.

        Raises:
            UserError: the system has not that much memory for this process.
        """
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        try:
            memory = _Lockable(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise UserError(
                f"the machine gives a process no {size / 2**30:.1f} GiB of host memory, for what it keeps there of a "
                f"model: {error.strerror}"
            ) from None
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        data = torch.frombuffer(memory, dtype=torch.uint8)
        pieces = data.split(TOUCHED_BYTES)  # type: ignore[no-untyped-call]
        with ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1)) as threads:
            list(threads.map(Tensor.zero_, pieces))
        self.pin(data)
        memory.address = data.data_ptr()
        return data

    def upload(self, numbers: Sequence[int]) -> Tensor:
        """int64 [len(numbers)] on the device; the host does not wait for it."""
        made = torch.tensor(numbers, dtype=torch.int64, pin_memory=self.name == "cuda")
        return made.to(self.device(), non_blocking=True)

    def memory_gib(self) -> dict[str, float]:
        """Memory of this process in GiB: ``allocated`` and ``peak``. On a CPU both are of the resident set."""
        if self.name == "cuda":
            now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        else:
            now = _resident_bytes()
            peak = max(now, _peak_resident_bytes())  # the kernel brings the two up to date at different times
        return {"allocated": now / 2**30, "peak": peak / 2**30}

    def free_bytes(self) -> int:
        """What nobody holds of the device's memory; 0 where there is no device."""
        return torch.cuda.mem_get_info()[0] if self.name == "cuda" else 0

    def reset_peak_memory(self) -> None:
        """The peak of ``memory_gib`` counts from now on. (A CPU's is of the process's whole life.)"""
        if self.name == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def bind_loopback(self, master_addr: str) -> None:
        """Keeps gloo on the loopback interface when all processes are on this machine; it would take the first one."""
        if master_addr in ("127.0.0.1", "localhost"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def broadcast_group(self, store: Any, rank: int, size: int, *, address: str, timeout_s: float) -> Any:
        """A process group beside torch's own one, to which any process may belong; rank 0 is to broadcast.

        Args:
            address: of this machine, on the network that the others are on. (NCCL finds its network by itself.)
            timeout_s: after that long an operation has failed by itself. NCCL would end the process then, so whoever
                waits for an operation gives up, and aborts the group, before.
        """
        timeout = datetime.timedelta(seconds=timeout_s)
        if self.name == "cpu":
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=address)]
            options._threads, options._timeout = 2, timeout
            return gloo(store, rank, size, options)
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        return nccl(store, rank, size, options)

    def prepare_megatron(self) -> None:
        """Must run before Megatron builds a model. Idempotent; does nothing on CUDA."""
        if self.name == "cpu":
            from vime.platform.megatron_on_cpu import apply_patches

            apply_patches()


class _Lockable(mmap.mmap):
    """Memory that is unlocked before it is unmapped, when the last tensor made of it is gone."""

    address = 0

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of the process the driver may have gone before
            _unlock(self.address)


_locked: set[int] = set()
"""Addresses of what this process has locked."""


def _unlock(address: int) -> None:
    if address in _locked:
        torch.cuda.synchronize()
        _locked.discard(address)
        call("cuMemHostUnregister", c_void_p(address))


CPU = Platform(name="cpu", backend="gloo", segment_kernel=False, fused_kernels=False, slice_elements=1 << 20)
CUDA = Platform(
    name="cuda", backend="cpu:gloo,cuda:nccl", segment_kernel=True, fused_kernels=True, slice_elements=1 << 26
)


@functools.cache
def current() -> Platform:
    """CUDA where torch sees a GPU, else the CPU."""
    return CUDA if torch.cuda.is_available() else CPU


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak_resident_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
