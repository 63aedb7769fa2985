"""Reads new weights back out of an engine's model, the way that the forward pass uses them.

A matrix times a unit vector is one of its columns, exactly, in any dtype: so even weights which exist only in packed
form can be compared bit by bit. Vectors (norms, biases) are compared whole. Of what was sent only those parts are kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

PROBED_COLUMNS = 2  # of each matrix, after each update; other ones each time


class WeightsDidNotArrive(RuntimeError):
    """After an update the model computes with other values than were sent."""


class Proof:
    """That a model computes with what was sent: ``take`` every tensor as it comes, ``check`` when all are loaded.

    To be made before the model begins to load.

    Args:
        names: of the tensors that will be sent.
        seed: chooses the columns.
    """

    def __init__(self, model: nn.Module, names: Collection[str], *, seed: int) -> None:
        self._readings = list(_readings(model, names, seed))
        self._takers: defaultdict[str, list[tuple[_Reading, int]]] = defaultdict(list)
        for reading in self._readings:
            for index, name in enumerate(reading.sources):
                self._takers[name].append((reading, index))

    def take(self, name: str, tensor: Tensor) -> None:
        """Keeps what will be compared of a whole tensor."""
        for reading, index in self._takers.get(name, ()):
            reading.sent[index] = reading.cut(index, tensor).clone()

    def check(self) -> int:
        """Returns of how many of the tensors something was found in the model.

        Raises:
            WeightsDidNotArrive: the model computes with something else, or with what is not a number.
        """
        differ = [reading.differs() for reading in self._readings]  # the device is asked for all answers at once
        wrong = [each.what for each, is_wrong in zip(self._readings, _to_list(differ), strict=True) if is_wrong]
        if wrong:
            rest = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise WeightsDidNotArrive(
                f"{wrong[0]}{rest} does not compute with what was sent, or with what is not finite"
            )
        return len(self._takers)


@dataclass
class _Reading:
    """One weight: how to find what was sent for it, and what the model has.

    ``cut``: (number of the source, the tensor that was sent) → the part of it that is compared.
    """

    what: str
    sources: Sequence[str]  # names of the tensors that were sent
    cut: Callable[[int, Tensor], Tensor]
    compute: Callable[[Tensor], Tensor]  # (what is expected) → the same from the model
    join: Callable[[list[Tensor]], Tensor]
    sent: dict[int, Tensor] = field(default_factory=dict)

    def differs(self) -> Tensor:
        """A bool on the model's device; true also of what is not a number."""
        expected = self.join([self.sent[index] for index in range(len(self.sources))])
        computed = self.compute(expected)
        expected = expected.to(computed.device, computed.dtype)
        return (without_subnormals(computed) != without_subnormals(expected)).any()


def _to_list(flags: list[Tensor]) -> list[bool]:
    return torch.stack(flags).tolist() if flags else []


def _readings(model: nn.Module, names: Collection[str], seed: int) -> Iterator[_Reading]:
    """One for each vector and each matrix of the model that is computed with as it was sent. Others are left out."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            sources = _sources(f"{path}.{leaf}", packed, names)
            if parameter.dim() == 1 and parameter.numel() and sources:
                yield _vector(f"{path}.{leaf}", module, leaf, sources)
        if _multiplies(module):
            sources = _sources(f"{path}.weight", packed, names)
            if sources:
                yield _columns(f"{path}.weight", module, sources, seed)


def _vector(what: str, module: nn.Module, leaf: str, sources: Sequence[str]) -> _Reading:
    return _Reading(
        what=what,
        sources=sources,
        cut=lambda index, tensor: own_part(module, index, tensor),
        compute=lambda expected: getattr(module, leaf).data,
        join=torch.cat,
    )


def _columns(what: str, module: Any, sources: Sequence[str], seed: int) -> _Reading:
    """Some columns, as [PROBED_COLUMNS, rows of the matrix]; the model may have more rows, which are padding."""

    def columns(width: int) -> list[int]:
        return [(7919 * seed + 104729 * i) % width for i in range(PROBED_COLUMNS)]

    def cut(index: int, tensor: Tensor) -> Tensor:
        part = own_part(module, index, tensor)
        widths.add(part.shape[1])
        return part[:, columns(part.shape[1])].T

    def compute(expected: Tensor) -> Tensor:
        (width,) = widths
        device = next(module.parameters()).device
        unit = torch.zeros(PROBED_COLUMNS, width, dtype=expected.dtype, device=device)
        unit[range(PROBED_COLUMNS), columns(width)] = 1
        with torch.inference_mode():
            computed: Tensor = module.quant_method.apply(module, unit, None)
        return computed[:, : expected.shape[1]]

    widths: set[int] = set()
    return _Reading(what=what, sources=sources, cut=cut, compute=compute, join=lambda parts: torch.cat(parts, dim=1))


def own_part(module: nn.Module, index: int, tensor: Tensor) -> Tensor:
    """What this process holds of a module's ``index``-th tensor: all of it, or a share under tensor parallelism."""
    if isinstance(module, VocabParallelEmbedding):
        own = module.shard_indices
        return tensor[own.org_vocab_start_index : own.org_vocab_end_index]
    if isinstance(module, RowParallelLinear):
        return tensor if tensor.dim() == 1 else _share(tensor, module.tp_rank, module.tp_size, dim=1)
    if isinstance(module, ColumnParallelLinear):
        # one key/value head may belong to several processes
        replicas = getattr(module, "num_kv_head_replicas", 1) if index else 1
        return _share(tensor, module.tp_rank // replicas, module.tp_size // replicas, dim=0)
    return tensor


def _share(tensor: Tensor, rank: int, size: int, *, dim: int) -> Tensor:
    length = tensor.shape[dim] // size
    return tensor.narrow(dim, rank * length, length)


def without_subnormals(values: Tensor) -> Tensor:
    """Values too small for a normal number as 0, which is how bfloat16 products of CPUs (VDPBF16PS) read them."""
    return values.masked_fill(values.abs() < torch.finfo(values.dtype).tiny, 0)


def _multiplies(module: nn.Module) -> bool:
    method = getattr(module, "quant_method", None)
    if isinstance(module, LinearBase):
        return isinstance(method, UnquantizedLinearMethod)
    return isinstance(module, VocabParallelEmbedding) and hasattr(module, "weight") and module.weight.dim() == 2


def _sources(name: str, packed: dict[str, list[str]], names: Collection[str]) -> list[str]:
    """The tensors sent for a parameter of the model; none if it has another name there than in the folder."""
    path, _, leaf = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    parts = [".".join(filter(None, (parent, part, leaf))) for part in packed.get(module, [module])]
    if parts == ["lm_head.weight"] and parts[0] not in names:
        parts = ["model.embed_tokens.weight"]  # tied
    return parts if all(part in names for part in parts) else []
