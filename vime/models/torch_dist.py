"""Weights in Megatron's torch_dist format, written and read tensor by tensor, without Megatron or a process group.

    iter_0000000/metadata.json    the names of the formats
    iter_0000000/common.pt        what is no tensor
    iter_0000000/__0_0.distcp     tensors, one behind the other, each as torch.save writes it
    iter_0000000/.metadata        which region of which tensor lies where (torch.distributed.checkpoint's Metadata)

Layers are slices of one tensor, ``decoder.layers.mlp.linear_fc1.weight`` [layers, …], if all are alike; so are experts.
Tensor parallelism leaves no trace: the parts of a tensor can be written and read in any cut.
"""

from __future__ import annotations

import itertools
import json
import math
import pickle
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from vime.errors import DamagedFile, UserError
from vime.files import writing
from vime.models.piecewise import PiecewiseFile

if TYPE_CHECKING:
    from torch import Tensor

    from vime.models.shape import ModelShape

__all__ = [
    "METADATA",
    "Place",
    "Region",
    "TorchDistReader",
    "TorchDistWriter",
    "candidates",
    "finish",
    "fused_norm_name",
    "place_of",
    "read_metadata",
]

METADATA = ".metadata"
CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
FUSED_NORMS = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter of the whole model is: ``tensor[index]`` of the tensor called ``key``."""

    key: str
    index: tuple[int, ...] = ()  # layer, expert: the leading dimensions that the parameter does not have
    counts: tuple[int, ...] = ()  # sizes of these dimensions


def place_of(name: str, shape: ModelShape) -> Place:
    """Where Megatron puts the parameter of this name, in which layers and experts are numbered over the whole model."""
    return _place(name, shape, stack_layers=not _layers_differ(shape), stack_experts=True)


def fused_norm_name(key: str) -> str:
    """What a key is called by a Megatron whose norms are fused with the linear layers behind them."""
    for norm, fused in FUSED_NORMS.items():
        key = key.replace(norm, fused)
    return key


def candidates(name: str, shape: ModelShape) -> Iterator[Place]:
    """Where the parameter may be in a checkpoint of anybody: versions and settings of Megatron differ in stacking."""
    yield place_of(name, shape)
    for alias, layers, experts in itertools.product((name, fused_norm_name(name)), (True, False), (True, False)):
        yield _place(alias, shape, stack_layers=layers, stack_experts=experts)


def _layers_differ(shape: ModelShape) -> bool:
    """Megatron stacks no layers if some have experts and some have not."""
    return isinstance(shape.transformer_fields().get("moe_layer_freq"), list)


def _place(name: str, shape: ModelShape, *, stack_layers: bool, stack_experts: bool) -> Place:
    index: list[int] = []
    counts: list[int] = []
    layer, expert = _LAYER.match(name), _EXPERT.search(name)
    if layer and stack_layers:
        name = _LAYER.sub("decoder.layers.", name)
        index.append(int(layer[1]))
        counts.append(shape.num_layers)
    if expert and not stack_experts:
        name = _EXPERT.sub(r".experts.\1.", name)
    elif expert:
        assert shape.moe is not None
        name = _EXPERT.sub(".experts.", name)
        index.append(int(expert[1]))
        counts.append(shape.moe.num_experts)
    return Place(name, tuple(index), tuple(counts))


@dataclass(frozen=True, slots=True)
class Region:
    """One written part of a tensor and where its bytes are."""

    key: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class TorchDistWriter:
    """Writes one rank's file. What it wrote is in ``regions``; ``finish`` makes a checkpoint of those of all ranks."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._name = f"__{rank}_0.distcp"
        self._path = folder / self._name
        with writing(self._path):
            self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115 (__exit__ closes it)
        self._pieces: Any = PiecewiseFile(self._file)
        self.regions: list[Region] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, place: Place, tensor: Tensor) -> None:
        """Appends a whole parameter, which is then no longer needed. Raises a UserError where the disk is full."""
        start = self._file.tell()
        sizes = (*(1 for _ in place.index), *tensor.shape)
        whole = tensor.detach().cpu().contiguous().reshape(sizes)
        with writing(self._path):
            torch.save(whole, self._pieces)
        self.regions.append(
            Region(
                key=place.key,
                shape=(*place.counts, *tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                offsets=(*place.index, *(0 for _ in tensor.shape)),
                sizes=sizes,
                file=self._name,
                start=start,
                length=self._file.tell() - start,
            )
        )


def finish(folder: Path, regions: Sequence[Region], common: Mapping[str, Any]) -> None:
    """Writes what makes the files in ``folder`` a checkpoint. ``common`` is its state that is not tensors."""
    tensors: dict[str, TensorStorageMetadata] = {}
    storage = {}
    for region in regions:
        properties = TensorProperties(dtype=getattr(torch, region.dtype))
        tensor = tensors.setdefault(region.key, TensorStorageMetadata(properties, torch.Size(region.shape), []))
        assert (tensor.size, tensor.properties.dtype) == (region.shape, properties.dtype), region
        index = MetadataIndex(region.key, region.offsets, len(tensor.chunks))
        storage[index] = _StorageInfo(region.file, region.start, region.length)
        tensor.chunks.append(ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.sizes)))
    _check_filled(tensors)
    with writing(folder):
        with open(folder / "common.pt", "wb") as file:
            torch.save(dict(common), file)
        with open(folder / METADATA, "wb") as file:
            pickle.dump(Metadata(dict(tensors), planner_data={}, storage_data=storage), file)
        (folder / "metadata.json").write_text(json.dumps(CONFIG), encoding="utf-8")


def _check_filled(tensors: Mapping[str, TensorStorageMetadata]) -> None:
    for key, tensor in tensors.items():
        written = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        assert written == math.prod(tensor.size), f"{key}: {written} of {math.prod(tensor.size)} elements written"


def read_metadata(folder: Path) -> Metadata:
    """What describes a checkpoint's tensors, read so that nothing in it can run code.

    Raises:
        UserError: it names files elsewhere.
        DamagedFile: it has more than that, cannot be read, or is of more than there is.
    """
    path = folder / METADATA
    try:
        with open(path, "rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        ends: Counter[str] = Counter()
        for info in metadata.storage_data.values():
            ends[str(info.relative_path)] = max(ends[str(info.relative_path)], info.offset + info.length)
    except UserError as error:
        raise DamagedFile(f"{path} {error}") from None
    except Exception as error:  # what damaged bytes raise may be anything
        raise DamagedFile(f"{path}: cannot be read: {_first_line(error)}") from error
    outside = sorted(name for name in ends if PurePath(name).is_absolute() or ".." in PurePath(name).parts)
    if outside:
        raise UserError(f"{path} names a file outside of the checkpoint, {outside[0]}; not loaded")
    _check_lengths(folder, ends)
    return metadata


def _check_lengths(folder: Path, ends: Mapping[str, int]) -> None:
    """Raises DamagedFile unless there is as much of every file as there are tensors said to be in it."""
    for name, end in sorted(ends.items()):
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DamagedFile(f"{path}: cannot be read: {error.strerror}") from error
        if size < end:
            raise DamagedFile(f"{path}: ends after {size} bytes, of the {end} that were written")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


class TorchDistReader:
    """The tensors of one checkpoint, ours or Megatron's. Metadata is read at once, data on demand.

    Raises:
        UserError: the folder is no torch_dist checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "metadata.json").is_file() or not (folder / METADATA).is_file():
            kind = "a torch checkpoint" if any(folder.glob("mp_rank_*")) else "not a Megatron checkpoint"
            raise UserError(f"{folder} is {kind}; only the torch_dist format can be converted")
        metadata = read_metadata(folder)
        self._storage: Mapping[MetadataIndex, _StorageInfo] = metadata.storage_data
        self._tensors = {
            key: tensor
            for key, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        return self._tensors[key].properties.dtype

    def find(self, name: str, shape: ModelShape) -> Place | None:
        """Where the parameter is."""
        return next((place for place in candidates(name, shape) if self._has(place)), None)

    def shape_at(self, place: Place) -> tuple[int, ...]:
        return self.shape(place.key)[len(place.index) :]

    def read(self, place: Place) -> Tensor:
        """A whole parameter."""
        sizes = (*(1 for _ in place.index), *self.shape_at(place))
        offsets = (*place.index, *(0 for _ in self.shape_at(place)))
        chunks = self._tensors[place.key].chunks
        for chunk in chunks:
            if (chunk.offsets, chunk.sizes) == (offsets, sizes):
                return self._load(place.key, chunk).reshape(self.shape_at(place))
        target = torch.empty(sizes, dtype=self.dtype(place.key))
        filled = 0
        for chunk in chunks:
            common = _intersection(offsets, sizes, chunk.offsets, chunk.sizes)
            if common is not None:
                part = self._load(place.key, chunk)[_slices(common, chunk.offsets)]
                target[_slices(common, offsets)] = part
                filled += part.numel()
        if filled != target.numel():
            raise UserError(f"{self.folder}: only {filled} of {target.numel()} elements of {place.key} are there")
        return target.reshape(self.shape_at(place))

    def _has(self, place: Place) -> bool:
        return place.key in self and self.shape(place.key)[: len(place.counts)] == place.counts

    def _load(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        info = self._storage.get(MetadataIndex(key, chunk.offsets))
        if info is None:
            raise DamagedFile(f"{self.folder / METADATA}: does not say where a part of {key} is")
        path = self.folder / info.relative_path
        try:
            with open(path, "rb") as file:
                view: Any = _create_file_view(file, info.offset, info.length)
                tensor: Tensor = torch.load(view, map_location="cpu", weights_only=True)
        except Exception as error:  # what damaged bytes raise may be anything
            raise DamagedFile(f"{path}: {key} cannot be read: {_first_line(error)}") from error
        if tuple(tensor.shape) != tuple(chunk.sizes):
            raise DamagedFile(f"{path}: {key} is {list(tensor.shape)} there instead of {list(chunk.sizes)}")
        return tensor


Box = tuple[tuple[int, int], ...]  # for each dimension, from where up to where


def _intersection(
    offsets_a: Sequence[int], sizes_a: Sequence[int], offsets_b: Sequence[int], sizes_b: Sequence[int]
) -> Box | None:
    ranges = [(max(a, b), min(a + n, b + m)) for a, n, b, m in zip(offsets_a, sizes_a, offsets_b, sizes_b, strict=True)]
    return tuple(ranges) if all(start < stop for start, stop in ranges) else None


def _slices(box: Box, offsets: Collection[int]) -> tuple[slice, ...]:
    return tuple(slice(start - offset, stop - offset) for (start, stop), offset in zip(box, offsets, strict=True))


# Megatron keeps plans beside the description of tensors, so they may be there. No name is a function that does
# anything with its arguments but look them up, and none has a dot, which pickle follows to whatever a module imports.
_DESCRIPTIONS = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {
        *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    },
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "builtins": {"set", "frozenset"},
}
_MEGATRONS = {
    ("megatron.core.dist_checkpointing.strategies.torch", name) for name in ("MCoreMetadata", "MCoreSavePlan")
}


class _MetadataUnpickler(pickle.Unpickler):
    """Builds what describes a checkpoint and nothing else, so that a checkpoint from elsewhere can run no code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _MEGATRONS:
            return type(name, (_Ignored,), {})
        if name not in _DESCRIPTIONS.get(module, ()):
            raise UserError(f"names {module}.{name}, which describes no tensor; not loaded")
        return super().find_class(module, name)


class _Ignored:
    def __init__(self, *_: object) -> None:
        pass
