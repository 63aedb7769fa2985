"""A checksum that a device computes as fast as it reads memory: what the sender of weights states of every bucket."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BLOCK_BYTES", "checksum"]

BLOCK_BYTES = 256
"""What a length must be a multiple of; see ``plan.ALIGNMENT``."""

COLUMN_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 divided by the golden ratio: an odd number that keeps the two sums apart."""


def checksum(data: Tensor) -> Tensor:
    """A number for the bytes ``data`` (uint8, contiguous, a multiple of ``BLOCK_BYTES`` long): an int64 scalar there.

    The bytes are a table of 8-byte integers with 256 bytes a row. Rows and columns are summed modulo 2^64 and weighted
    with the odd numbers by their place, so that bytes in another place count as other bytes. It finds a transfer that
    moved nothing, too little or to the wrong place; it is no defence against somebody who wants to deceive.
    """
    table = data.view(torch.int64).view(-1, BLOCK_BYTES // 8)
    rows, columns = table.sum(dim=1), table.sum(dim=0)
    return _weighted(rows) + COLUMN_FACTOR * _weighted(columns)


def _weighted(values: Tensor) -> Tensor:
    odd = torch.arange(1, 2 * len(values), 2, dtype=torch.int64, device=values.device)
    return (values * odd).sum()
