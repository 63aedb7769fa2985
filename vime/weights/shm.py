"""Memory that the trainer writes and engines on the same machine read.

The buffer is an anonymous memory file, reached through ``/proc/<pid>/fd/<n>``. It has no name in any file system, so it
is gone with the last process that holds it, however that process ends, and no limit on /dev/shm applies.
"""

from __future__ import annotations

import math
import mmap
import os
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from vime.platform import current
from vime.weights.plan import PlanMismatch, TensorSpec, WeightPlan


class SharedBuffer:
    """A writable uint8 buffer of ``size`` bytes, made once and used for every sync.

    Its pages are allocated at once: the first sync is as fast as the others, and a lack of memory shows at the start.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._fd = os.memfd_create("vime-weights", os.MFD_CLOEXEC)
        os.posix_fallocate(self._fd, 0, max(size, 1))
        self._map = mmap.mmap(self._fd, max(size, 1), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)
        current().pin(self.data)

    @property
    def path(self) -> str:
        """Where other processes of this user on this machine can open the buffer while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, plan: WeightPlan, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See ``write``."""
        if plan.total_bytes > self.size:
            raise PlanMismatch(f"the plan needs {plan.total_bytes} bytes, the buffer has {self.size}")
        write(self.data, plan, tensors)

    def close(self) -> None:
        """Gives the memory back once no reader maps it any more. Tensors made from ``data`` must be gone."""
        current().unpin(self.data)
        del self.data
        self._map.close()
        os.close(self._fd)


def write(data: Tensor, plan: WeightPlan, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copies every tensor of the plan to its place in the bytes ``data``, converting to the plan's dtype, and waits.

    Tensors may come in any order, from any device. A copy on a CPU runs on all of torch's intra-op threads; each tensor
    may be freed once the next one is asked for.

    Raises:
        PlanMismatch: a tensor is unknown, comes twice, has another shape, or is missing in the end.
    """
    missing = dict(plan.by_name)
    with torch.no_grad():
        for name, tensor in tensors:
            spec = missing.pop(name, None)
            if spec is None:
                known = "comes twice" if name in plan.by_name else "is not in the plan"
                raise PlanMismatch(f"{name} {known}")
            if tuple(tensor.shape) != spec.shape:
                raise PlanMismatch(f"{name} has shape {list(tensor.shape)}, the plan says {list(spec.shape)}")
            view(data, spec).copy_(tensor, non_blocking=True)
    current().synchronize()
    if missing:
        raise PlanMismatch(f"{len(missing)} tensors of the plan were not written: {next(iter(missing))} and on")


def view(data: Tensor, spec: TensorSpec) -> Tensor:
    """The tensor ``spec`` within the bytes ``data``."""
    size = math.prod(spec.shape)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return data[spec.offset : spec.offset + size * dtype.itemsize].view(dtype).view(spec.shape)


def open_shared(path: str, size: int) -> Tensor:
    """Maps the first ``size`` bytes of another process's SharedBuffer, read-only.

    The tensor must not be written to: that would be a segmentation fault. The mapping ends with the tensor's last view.

    Raises:
        OSError: the process is gone, on another machine, or of another user.
        ValueError: the buffer is smaller than ``size``.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that the memory is read-only, as it should be
        return torch.frombuffer(mapping, dtype=torch.uint8)
