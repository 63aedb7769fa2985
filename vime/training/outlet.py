"""Where the trainer's weights leave for the engines: into memory of this machine, or to a process group."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from vime.models import ModelShape
from vime.training.records import Export
from vime.training.weights_io import drain, hf_plan, hf_weights
from vime.weights.broadcast import Sender
from vime.weights.invitation import Invitation, SendReport
from vime.weights.plan import WeightPlan
from vime.weights.shm import SharedBuffer

__all__ = ["WeightOutlet"]


class WeightOutlet:
    """Of one rank. ``export`` and ``broadcast`` are collective: the first rank gathers what the others hold."""

    def __init__(self, chunks: Sequence[Any], shape: ModelShape, dtype: torch.dtype) -> None:
        self._chunks, self._shape, self._dtype = chunks, shape, dtype
        self._buffer: SharedBuffer | None = None
        self._sender: Sender | None = None

    @functools.cached_property
    def plan(self) -> WeightPlan:
        """The tensors under their HF names, in the order in which they are gathered."""
        return WeightPlan.of((name, shape, str(dtype)) for name, shape, dtype in hf_plan(self._shape, self._dtype))

    def export(self) -> Export | None:
        """Writes the weights where engines on this machine can map them; None beside rank 0."""
        weights = hf_weights(self._chunks, self._shape)
        if dist.get_rank() != 0:
            drain(weights)
            return None
        if self._buffer is None:
            self._buffer = SharedBuffer(self.plan.total_bytes)
        self._buffer.write(self.plan, weights)
        return Export(plan=self.plan, path=self._buffer.path)

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
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
