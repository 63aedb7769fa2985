"""Brings the shards of a model to rank 0, tensor by tensor, whatever the layout.

Tensor parallelism cuts tensors, pipeline parallelism spreads layers, expert parallelism spreads experts and expert
tensor parallelism cuts them. A rank sends what it holds of some consecutive tensors as one message, so the experts of
a layer travel in bulk, and no rank ever holds more than such a bucket besides its own weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor

from vime.models import HfTensor, WeightRule

__all__ = ["BUCKET_BYTES", "gather"]

BUCKET_BYTES = 256 << 20
"""Consecutive tensors travel together up to this size; a larger one travels alone."""

ALIGNMENT = 16
"""Tensors begin at multiples of so many bytes in a message, so that they can be read in place as any dtype."""

_LAYER = re.compile(r"^[\w.]*?layers\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one rank stands in the layout, and what its pipeline stage holds."""

    parts: frozenset[str]  # layers, and the names of parameters outside of layers
    tensor: int  # ranks inside the groups
    expert: int
    expert_tensor: int
    first_replica: bool  # of the data-parallel copies of what experts do not own
    first_expert_replica: bool
    vocabulary_rows: int  # of the embedding or output layer on each rank; 0 where neither is

    @classmethod
    def here(cls, parameters: Mapping[str, Tensor], rules: Iterable[WeightRule]) -> Place:
        held = [rule.megatron for rule in rules if rule.vocabulary and rule.megatron in parameters]
        return cls(
            parts=frozenset(_part(name) for name in parameters),
            tensor=parallel_state.get_tensor_model_parallel_rank(),
            expert=parallel_state.get_expert_model_parallel_rank(),
            expert_tensor=parallel_state.get_expert_tensor_parallel_rank(),
            first_replica=parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0,
            first_expert_replica=parallel_state.get_expert_data_parallel_rank() == 0,
            vocabulary_rows=len(parameters[held[0]]) if held else 0,
        )


def gather(
    parameters: Mapping[str, Tensor], rules: Sequence[WeightRule], num_experts: int, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yields every HF tensor whole on global rank 0, in the order of the rules; nothing on other ranks. Collective.

    Args:
        parameters: what this rank holds, by global Megatron names.
        num_experts: of one layer, on all ranks; 0 where there are none.
        dtype: of all tensors that have none of their own.
    """
    if dist.get_world_size() == 1:
        yield from _local(parameters, rules)
        return
    places: list[Place] = [None] * dist.get_world_size()  # type: ignore[list-item]
    dist.all_gather_object(places, Place.here(parameters, rules))
    layout = _Layout(places, num_experts, dtype)
    for bucket in layout.buckets(rules):
        if dist.get_rank() == 0:
            yield from _receive(bucket, layout, parameters)
        else:
            _send(bucket, layout, parameters)


def _local(parameters: Mapping[str, Tensor], rules: Sequence[WeightRule]) -> Iterator[tuple[str, Tensor]]:
    for rule in rules:
        for tensor, piece in zip(rule.hf, rule.op.split(parameters[rule.megatron].detach()), strict=True):
            yield tensor.name, piece[: tensor.shape[0]] if rule.vocabulary else piece


class _Layout:
    """Who has which shard, and how large it is; every rank comes to the same answers."""

    def __init__(self, places: Sequence[Place], num_experts: int, dtype: torch.dtype) -> None:
        self._vocabulary_rows = max(place.vocabulary_rows for place in places)
        self._dtype = dtype
        self._tensor_ranks = 1 + max(place.tensor for place in places)
        self._expert_tensor_ranks = 1 + max(place.expert_tensor for place in places)
        self._experts_each = max(1, num_experts // (1 + max(place.expert for place in places)))
        self._dense: dict[tuple[str, int], int] = {}
        self._experts: dict[tuple[str, int, int], int] = {}
        for rank, place in enumerate(places):
            for part in place.parts:
                if place.first_replica:
                    self._dense.setdefault((part, place.tensor), rank)
                if place.first_expert_replica:
                    self._experts.setdefault((part, place.expert, place.expert_tensor), rank)

    def holders(self, rule: WeightRule) -> list[int]:
        """The global ranks that have the shards of a parameter, first shard first."""
        part = _part(rule.megatron)
        if rule.expert is None:
            return [self._dense[part, shard] for shard in range(self._tensor_ranks if rule.tp_dim is not None else 1)]
        owner = rule.expert // self._experts_each
        shards = range(self._expert_tensor_ranks if rule.tp_dim is not None else 1)
        return [self._experts[part, owner, shard] for shard in shards]

    def shard_shape(self, tensor: HfTensor, rule: WeightRule) -> tuple[int, ...]:
        if rule.tp_dim is None:
            return tensor.shape
        shape = list(tensor.shape)
        if rule.vocabulary:
            shape[0] = self._vocabulary_rows
        else:
            shape[rule.tp_dim] //= self._tensor_ranks if rule.expert is None else self._expert_tensor_ranks
        return tuple(shape)

    def dtype(self, tensor: HfTensor) -> torch.dtype:
        return getattr(torch, tensor.dtype) if tensor.dtype else self._dtype

    def shard_bytes(self, tensor: HfTensor, rule: WeightRule) -> int:
        size = math.prod(self.shard_shape(tensor, rule)) * self.dtype(tensor).itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT

    def buckets(self, rules: Sequence[WeightRule]) -> Iterator[list[WeightRule]]:
        bucket: list[WeightRule] = []
        size = 0
        for rule in rules:
            added = sum(self.shard_bytes(tensor, rule) for tensor in rule.hf) * len(self.holders(rule))
            if bucket and size + added > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(rule)
            size += added
        yield bucket


def _send(bucket: Sequence[WeightRule], layout: _Layout, parameters: Mapping[str, Tensor]) -> None:
    """Everything that this rank holds of the bucket, as one message."""
    held = [rule for rule in bucket if dist.get_rank() in layout.holders(rule)]
    pieces = [piece for rule in held for piece in rule.op.split(parameters[rule.megatron].detach())]
    if pieces:
        dist.send(torch.cat([_as_bytes(piece) for piece in pieces]), dst=0)


def _receive(
    bucket: Sequence[WeightRule], layout: _Layout, parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The bucket's tensors, put together from what others send and what this rank holds itself."""
    device = next(iter(parameters.values())).device
    messages = _Messages(bucket, layout, device)
    for rule in bucket:
        own = rule.op.split(parameters[rule.megatron].detach()) if 0 in layout.holders(rule) else ()
        for number, tensor in enumerate(rule.hf):
            shards = [
                own[number] if rank == 0 else messages.next(rank, layout, tensor, rule) for rank in layout.holders(rule)
            ]
            whole = shards[0] if len(shards) == 1 else rule.join_shards(shards)
            yield tensor.name, whole[: tensor.shape[0]] if rule.vocabulary else whole


class _Messages:
    """What rank 0 gets for one bucket: a run of bytes from each rank that holds some of it, read piece after piece."""

    def __init__(self, bucket: Sequence[WeightRule], layout: _Layout, device: torch.device) -> None:
        sizes: dict[int, int] = {}
        for rule in bucket:
            for rank in layout.holders(rule):
                sizes[rank] = sizes.get(rank, 0) + sum(layout.shard_bytes(tensor, rule) for tensor in rule.hf)
        sizes.pop(0, None)
        self._bytes = {rank: torch.empty(size, dtype=torch.uint8, device=device) for rank, size in sizes.items()}
        self._read = dict.fromkeys(sizes, 0)
        for work in [dist.irecv(message, src=rank) for rank, message in self._bytes.items()]:
            assert work is not None
            work.wait()

    def next(self, rank: int, layout: _Layout, tensor: HfTensor, rule: WeightRule) -> Tensor:
        """The next shard from that rank, which is the one of this tensor: both sides follow the rules' order."""
        shape, dtype = layout.shard_shape(tensor, rule), layout.dtype(tensor)
        start = self._read[rank]
        self._read[rank] += layout.shard_bytes(tensor, rule)
        end = start + math.prod(shape) * dtype.itemsize
        return self._bytes[rank][start:end].view(dtype).view(shape)


def _as_bytes(piece: Tensor) -> Tensor:
    raw = piece.contiguous().view(-1).view(torch.uint8)
    return F.pad(raw, (0, -len(raw) % ALIGNMENT))


def _part(name: str) -> str:
    """The layer that a parameter belongs to, or its whole name."""
    match = _LAYER.match(name)
    return match[0] if match else name
