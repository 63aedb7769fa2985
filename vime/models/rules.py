"""How a Megatron parameter is made of HF tensors, declared once and used in both directions.

A rule joins HF tensors to one Megatron parameter (``merge``) and takes it apart again (``split``). Tensor parallelism
needs no rule of its own: cutting every HF tensor along ``tp_dim`` and merging the pieces gives exactly the shard that
Megatron keeps, for grouped queries and gated projections too. So a rank reads only its slice of each HF tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Op(Protocol):
    """Joins HF tensors to a Megatron tensor and back; exact, and the same for full tensors and for TP shards."""

    def merge(self, parts: Sequence[Tensor]) -> Tensor: ...

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]: ...


class Direct:
    """One HF tensor is the Megatron parameter."""

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        (part,) = parts
        return part

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor,)


DIRECT = Direct()


class GatedConcat:
    """gate [F, H] over up [F, H] → fc1 [2F, H]."""

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        import torch

        return torch.cat(list(parts))

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.chunk(2)


@dataclass(frozen=True)
class QkvInterleave:
    """q [N·D, …], k [G·D, …], v [G·D, …] → qkv, group after group: its N/G queries, its key, its value.

    N = attention heads, G = query groups, D = ``kv_channels``. Works for weights and for biases.
    """

    heads_per_group: int
    kv_channels: int

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        import torch

        groups = parts[1].shape[0] // self.kv_channels
        by_group = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        import torch

        sizes = [self.heads_per_group * self.kv_channels, self.kv_channels, self.kv_channels]
        by_group = tensor.reshape(-1, sum(sizes), *tensor.shape[1:])
        return tuple(part.flatten(0, 1) for part in torch.split(by_group, sizes, dim=1))


@dataclass(frozen=True, slots=True)
class HfTensor:
    """Name and full shape of one tensor in a HuggingFace checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None  # torch's name, where it is not that of the other weights, there and in Megatron


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """One Megatron parameter and the HF tensors that it is made of."""

    megatron: str  # name in the whole model: layers are numbered over all pipeline stages
    hf: tuple[HfTensor, ...]
    op: Op = DIRECT
    tp_dim: int | None = None  # dimension of every HF tensor that tensor parallelism cuts; None: each rank has all
    tp_parts: int = 1  # equal pieces of every HF tensor along ``tp_dim``, each of which is cut for itself
    vocabulary: bool = False  # rows are tokens: padded with zeros at the end before the cut
    layer: int | None = None  # the decoder layer that it belongs to
    expert: int | None = None  # the expert that it belongs to; experts are spread over expert-parallel ranks, and
    # ``tp_dim`` is then cut by expert tensor parallelism
    copies: tuple[str, ...] = ()  # further Megatron parameters with the same value, where a pipeline stage has them

    def shard_edges(self, tensor: HfTensor, rank: int, size: int) -> list[tuple[int, int]]:
        """Where the pieces of ``tensor`` that a rank of ``size`` has begin and end along ``tp_dim``."""
        assert self.tp_dim is not None
        length = tensor.shape[self.tp_dim] // (self.tp_parts * size)
        starts = [(part * size + rank) * length for part in range(self.tp_parts)]
        return [(start, start + length) for start in starts]

    def join_shards(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole HF tensor of what all ranks have of it, in their order."""
        import torch

        assert self.tp_dim is not None
        by_rank = [shard.chunk(self.tp_parts, dim=self.tp_dim) for shard in shards]
        return torch.cat([pieces[part] for part in range(self.tp_parts) for pieces in by_rank], dim=self.tp_dim)
