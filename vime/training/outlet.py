"""Where the trainer's weights leave for the engines: into memory of this machine or its GPUs, or to a process group."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from vime.models import ModelShape
from vime.platform import current
from vime.platform.cuda_driver import DriverError
from vime.platform.device_memory import DeviceBuffer, device_id
from vime.training.records import Export
from vime.training.weights_io import drain, hf_plan, hf_weights
from vime.weights.broadcast import Sender
from vime.weights.invitation import Invitation, SendReport
from vime.weights.plan import WeightPlan
from vime.weights.shm import SharedBuffer, write

__all__ = ["WeightOutlet"]

SPARE_BYTES = 2 << 30
"""What must be left on each device beside a copy of the weights, for gathering them."""


class WeightOutlet:
    """Of one rank. ``export`` and ``broadcast`` are collective: the first rank gathers what the others hold."""

    def __init__(self, chunks: Sequence[Any], shape: ModelShape, dtype: torch.dtype) -> None:
        self._chunks, self._shape, self._dtype = chunks, shape, dtype
        self._buffer: SharedBuffer | None = None
        self._copy: DeviceBuffer | None = None
        self._sender: Sender | None = None

    @functools.cached_property
    def plan(self) -> WeightPlan:
        """The tensors under their HF names, in the order in which they are gathered."""
        return WeightPlan.of((name, shape, str(dtype)) for name, shape, dtype in hf_plan(self._shape, self._dtype))

    def export(self, *, on_device: bool = False) -> Export | None:
        """Writes the weights where engines on this machine can map them; None beside rank 0.

        Args:
            on_device: a copy on each rank's device, for engines on the same devices, until ``drop_copy``; in shared
                host memory nevertheless if one lacks the room, or lets no process see another's memory.
        """
        self.drop_copy()
        if on_device and self._all_have_room():
            return self._copy_on_each_device()
        weights = hf_weights(self._chunks, self._shape)
        if dist.get_rank() != 0:
            drain(weights)
            return None
        if self._buffer is None:
            self._buffer = SharedBuffer(self.plan.total_bytes)
        self._buffer.write(self.plan, weights)
        return Export(plan=self.plan, path=self._buffer.path)

    def _all_have_room(self) -> bool:
        """Takes it on each rank, or on none."""
        needed = self.plan.total_bytes + SPARE_BYTES
        if current().free_bytes() < needed:
            current().release_cached_memory()
        if current().free_bytes() >= needed:
            with suppress(DriverError):
                self._copy = DeviceBuffer(self.plan.total_bytes)
        have_it = torch.tensor(int(self._copy is not None), device=current().device())
        dist.all_reduce(have_it, op=dist.ReduceOp.MIN)
        if not have_it:
            self.drop_copy()
        return bool(have_it)

    def _copy_on_each_device(self) -> Export | None:
        """An engine's process reads the copy of its own device, so no device needs a way to another one."""
        copy = self._copy
        assert copy is not None, "all have room"
        weights = hf_weights(self._chunks, self._shape)
        if dist.get_rank() == 0:
            write(copy.data, self.plan, weights)
        else:
            drain(weights)
        handles: list[tuple[str, str]] = [(device_id(), copy.handle)] * dist.get_world_size()
        if len(handles) > 1:
            dist.broadcast(copy.data, src=0)
            current().synchronize()
            dist.all_gather_object(handles, (device_id(), copy.handle))
        return Export(plan=self.plan, handles=dict(handles)) if dist.get_rank() == 0 else None

    def drop_copy(self) -> None:
        """Frees the copy of the weights on this rank's device; engines have read it."""
        if self._copy is not None:
            self._copy.close()
            self._copy = None

    def invite(self, address: str, members: int, *, timeout_s: float) -> Invitation:
        """Makes a group for so many processes of engines, which reach this rank at ``address``. Not collective."""
        if self._sender is not None:
            self._sender.close()
        self._sender = Sender(address, members, timeout_s=timeout_s)
        return self._sender.invitation

    def join(self) -> None:
        """Waits for those who were invited. Raises PeerLost, WrongBytes."""
        assert self._sender is not None, "nobody was invited"
        self._sender.join()

    def broadcast(self, bucket_bytes: int) -> SendReport | None:
        """Sends the weights to the group; None beside rank 0. Which members failed stands in the report."""
        weights = hf_weights(self._chunks, self._shape)
        if dist.get_rank() != 0:
            drain(weights)
            return None
        assert self._sender is not None, "nobody was invited"
        try:
            return self._sender.send(self.plan, bucket_bytes, weights)
        finally:
            drain(weights)  # whatever happened, the other ranks are still sending theirs

    def close(self) -> None:
        self.drop_copy()
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
