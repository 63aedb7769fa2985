"""The processes that torchrun started, for work that needs no Megatron; a process that nothing started is alone."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from vime.platform import current

__all__ = ["Ranks", "torchrun_ranks"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among its like. All methods are collective; one that fails or dies fails the others too."""

    rank: int
    size: int

    @property
    def first(self) -> bool:
        return self.rank == 0

    def from_first(self, value: Any) -> Any:
        """What the first one passed."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """What each one passed, by rank, in the first; nothing in the others."""
        if self.size == 1:
            return [value]
        values = [None] * self.size if self.first else None
        dist.gather_object(value, values)
        return values or []

    def wait(self) -> None:
        """Until all have come here."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def torchrun_ranks(timeout: datetime.timedelta) -> Iterator[Ranks]:
    """Joins the processes of torchrun until the end of the block; no wait for another one lasts longer than this."""
    ranks = Ranks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    if ranks.size == 1:
        yield ranks
        return
    current().bind_loopback(os.environ["MASTER_ADDR"])
    dist.init_process_group("gloo", timeout=timeout)  # torchrun's variables say where
    try:
        yield ranks
    finally:
        dist.destroy_process_group()
