"""Reading and writing the weights of a HuggingFace model folder, tensor by tensor, without transformers."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from vime.errors import UserError
from vime.files import read_json_object, reading, writing
from vime.models.family import export_map, hf_tensors, is_carried, weight_map
from vime.models.fp8 import SCALE_SUFFIX, block_of, dequantised
from vime.models.rules import HfTensor, WeightRule
from vime.models.safetensors_file import SafetensorsFile, write_safetensors
from vime.models.shape import ModelShape
from vime.unfinished import Owner, owner_of, unfinished

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_SHARD_BYTES = 5_000_000_000  # as transformers writes them
NAMED_IN_MESSAGES = 5
COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")  # all of a model folder but its weights
MODEL_FILES = {
    "config.json", "generation_config.json", "chat_template.jinja", "chat_template.json", "tokenizer.json",
    "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tekken.json", "tiktoken.model", INDEX_NAME,
}  # fmt: skip
"""What a model folder may have besides weights, wherever it came from."""
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


class HfWeights:
    """The tensors of one folder. Headers are read at once, data only on demand and only the rows that are asked for.

    Weights in 8 bits (see ``vime.models.fp8``) are read as bfloat16; their scales do not appear.

    Raises:
        UserError: files are missing, cut off, or quantised in a way that is not supported.
    """

    def __init__(self, hf_dir: Path) -> None:
        self.hf_dir = hf_dir
        self._block = block_of(hf_dir)
        self._stack = contextlib.ExitStack()
        self._files: dict[str, SafetensorsFile] = {}  # by tensor
        for path in weight_files(hf_dir):
            file = self._stack.enter_context(SafetensorsFile(path))
            self._files |= dict.fromkeys(file.tensors, file)
        self._scales = {} if self._block is None else self._take_scales()

    def _take_scales(self) -> dict[str, SafetensorsFile]:
        """By the weight that they belong to."""
        named = [name for name in self._files if name.endswith(SCALE_SUFFIX)]
        return {name.removesuffix(SCALE_SUFFIX): self._files.pop(name) for name in named}

    def __enter__(self) -> HfWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].tensors[name].shape

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> Tensor:
        """The tensor, or its rows (dim 0) or columns (dim 1) from ``start`` to ``stop``."""
        if name in self._scales:
            return self._read_dequantised(name, dim, start, stop)
        return _read(self._files[name], name, dim, start, stop)

    def dtype(self, name: str) -> str:
        """Torch's name of the dtype in which ``read`` returns a tensor."""
        return "bfloat16" if name in self._scales else self._files[name].tensors[name].dtype

    def _read_dequantised(self, name: str, dim: int | None, start: int, stop: int) -> Tensor:
        assert self._block is not None
        weight = _read(self._files[name], name, dim, start, stop)
        first = [0, 0]
        if dim is not None:
            size = self._block[dim]
            first[dim] = start % size
            start, stop = start // size, -(-stop // size)
        scale = _read(self._scales[name], name + SCALE_SUFFIX, dim, start, stop)
        return dequantised(weight, scale, self._block, (first[0], first[1]))

    def check_model(self, shape: ModelShape) -> None:
        """Raises a UserError unless the folder has the tensors of this model."""
        self.check(hf_tensors(shape), ignorable=self._ignorable(shape))

    def export_map(self, shape: ModelShape) -> tuple[WeightRule, ...]:
        """The rules of what is written in place of this folder: where it has a copy of a tensor, so has the other."""
        return export_map(shape, self.names)

    def carried(self, shape: ModelShape) -> list[HfTensor]:
        """What is there besides the model's own tensors and goes from one folder to the next as it is."""
        own = {tensor.name for rule in self.export_map(shape) for tensor in rule.hf}
        names = sorted(name for name in self.names if name not in own and is_carried(shape, name))
        return [HfTensor(name, self.shape(name), self.dtype(name)) for name in names]

    def _ignorable(self, shape: ModelShape) -> list[str]:
        """Written copies of other tensors, and what is carried."""
        copies = ["lm_head.weight"] if shape.tie_word_embeddings else []
        copies += [tensor.name for rule in self.export_map(shape) for tensor in rule.hf]
        return copies + [tensor.name for tensor in self.carried(shape)]

    def check(self, expected: Sequence[HfTensor], *, ignorable: Collection[str] = ()) -> None:
        """Compares names and shapes with what the architecture has.

        Args:
            ignorable: names that may be there although nothing needs them.

        Raises:
            UserError: tensors are missing, unexpected, of another shape, or in 8 bits without scales; the message names
                them.
        """
        names = {tensor.name for tensor in expected}
        missing = [tensor.name for tensor in expected if tensor.name not in self._files]
        extra = self._files.keys() - names - set(ignorable)
        unexpected = sorted(name for name in extra if not name.endswith("rotary_emb.inv_freq"))
        wrong = [
            f"{tensor.name} is {list(self.shape(tensor.name))} instead of {list(tensor.shape)}"
            for tensor in expected
            if tensor.name in self._files and self.shape(tensor.name) != tensor.shape
        ]
        bare = [name for name in names if name in self._files and self.dtype(name).startswith("float8")]
        problems = [
            ("missing tensors", missing),
            ("unexpected tensors", unexpected),
            ("tensors of a wrong shape", wrong),
            (f"tensors in 8 bits without their scales, *{SCALE_SUFFIX}", sorted(bare)),
        ]
        told = "; ".join(f"{what}: {_some(items)}" for what, items in problems if items)
        if told:
            raise UserError(f"{self.hf_dir}: the weights do not fit its config.json: {told}")


def _read(file: SafetensorsFile, name: str, dim: int | None, start: int, stop: int) -> Tensor:
    if dim is None:
        return file.read(name)
    return file.read(name, (start, stop)) if dim == 0 else file.read(name)[:, start:stop].contiguous()


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file of a folder and what it holds."""

    file: str
    tensors: tuple[HfTensor, ...]


def write_hf_folder(
    directory: Path, *, origin: Path, plan: Sequence[HfTensor], tensors: Iterable[tuple[str, Tensor]], dtype: str
) -> None:
    """Writes a complete model folder: weights, config.json with ``dtype``, and the other files of ``origin``.

    The folder appears at once, when everything is in it. One from before is replaced if it has nothing but a model. No
    more than one tensor is held at a time.

    Args:
        plan: all tensors in the order in which ``tensors`` gives them.
        dtype: name of the dtype of every tensor that has none of its own, e.g. "bfloat16".

    Raises:
        UserError: ``directory`` holds something that is not a model, or is ``origin`` itself.
    """
    with new_model_folder(directory, origin) as work:
        given = iter(tensors)
        for shard in shards_of(plan, dtype):
            write_shard(work, shard, islice(given, len(shard.tensors)), dtype)
        assert next(given, None) is None, "more tensors than planned"
        write_all_but_weights(work, origin=origin, plan=plan, dtype=dtype)


def export_plan(origin: Path, shape: ModelShape) -> tuple[tuple[WeightRule, ...], list[HfTensor]]:
    """What an exported folder has: the rules of what comes from the model, and the tensors that it gets from ``origin``
    (see ``is_carried``); none of these if no weights are there."""
    if not any((origin / name).is_file() for name in (INDEX_NAME, SINGLE_NAME)):
        if shape.num_mtp_layers or shape.longest_exact_context is not None:
            logger.warning("%s has no weights: layers that are not trained are missing in the export", origin)
        return weight_map(shape), []
    with HfWeights(origin) as weights:
        return weights.export_map(shape), weights.carried(shape)


def read_carried(origin: Path, tensors: Sequence[HfTensor]) -> Iterator[tuple[str, Tensor]]:
    """Those tensors as ``origin`` has them, one after the other."""
    if tensors:
        with HfWeights(origin) as weights:
            yield from ((tensor.name, weights.read(tensor.name)) for tensor in tensors)


@contextlib.contextmanager
def new_model_folder(directory: Path, origin: Path) -> Iterator[Path]:
    """A hidden folder that takes the place of ``directory`` at the end of the block, and is removed if that fails.

    A process that is killed leaves the hidden folder, which the next one to write ``directory`` removes.

    Raises:
        UserError: ``directory`` holds something that is not a model, is ``origin`` itself, or cannot be written.
    """
    check_replaceable(directory, origin)
    directory = directory.resolve()  # not a link would be replaced, but what it stands for
    work = unfinished(directory)
    with writing(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned_work(directory)
        work.mkdir()
    try:
        yield work
        check_replaceable(directory, origin)  # writing a model takes long
        with writing(directory):
            _put_in_place(work, directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def shards_of(plan: Sequence[HfTensor], dtype: str) -> list[Shard]:
    """Spreads tensors over files of at most ``MAX_SHARD_BYTES``, in order; a larger tensor has a file of its own."""
    groups: list[list[HfTensor]] = [[]]
    size = 0
    for tensor in plan:
        tensor_bytes = bytes_of(tensor, dtype)
        if groups[-1] and size + tensor_bytes > MAX_SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor_bytes
    if len(groups) == 1:
        return [Shard(SINGLE_NAME, tuple(plan))]
    return [
        Shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", tuple(group))
        for number, group in enumerate(groups, 1)
    ]


def write_shard(work: Path, shard: Shard, tensors: Iterable[tuple[str, Tensor]], dtype: str) -> None:
    """Writes one file while ``tensors`` yields its contents."""
    plan = [(tensor.name, tensor.dtype or dtype, tensor.shape) for tensor in shard.tensors]
    write_safetensors(work / shard.file, plan, tensors)


def write_all_but_weights(work: Path, *, origin: Path, plan: Sequence[HfTensor], dtype: str) -> None:
    """Writes the index, config.json, and what else a model folder needs from ``origin``."""
    with writing(work):
        _copy_small_files(origin, work)
        _write_config(origin, work, plan, dtype)
        _write_index(work, plan, dtype)


def _write_index(work: Path, plan: Sequence[HfTensor], dtype: str) -> None:
    shards = shards_of(plan, dtype)
    if len(shards) > 1:
        weight_map = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
        index = {"metadata": {"total_size": sum(bytes_of(t, dtype) for t in plan)}, "weight_map": weight_map}
        (work / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def bytes_of(tensor: HfTensor, dtype: str) -> int:
    """Bytes of a tensor whose dtype is ``dtype`` unless it has its own."""
    import torch

    itemsize: int = getattr(torch, tensor.dtype or dtype).itemsize
    return math.prod(tensor.shape) * itemsize


def check_replaceable(directory: Path, origin: Path) -> None:
    """Raises a UserError unless a model may be written to ``directory``: nothing is there but a model, if anything."""
    with reading(directory):
        _check_replaceable(directory, origin)


def _check_replaceable(directory: Path, origin: Path) -> None:
    if directory.resolve() == origin.resolve():
        raise UserError(f"{directory}: is the original model's folder; write to another one")
    if directory.is_file():
        raise UserError(f"{directory}: is a file; a folder can be written there only if nothing has its name")
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory}: is not empty and not a model folder; it is left alone, name another one")
    foreign = _foreign_file(directory, origin)
    if foreign is not None:
        raise UserError(
            f"{directory}: would be replaced, but {foreign.relative_to(directory)} in it is no file of a model; it is "
            "left alone: move that file, or name another folder"
        )


def _foreign_file(directory: Path, origin: Path) -> Path | None:
    """The first file, or empty folder, below ``directory`` that no model which came from ``origin`` has."""
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            return min((inner for inner in path.rglob("*") if not inner.is_dir()), default=path)
        copied = path.suffix in COPIED_SUFFIXES and (origin / path.name).is_file()
        if not (copied or path.name in MODEL_FILES or _WEIGHT_FILE.fullmatch(path.name)):
            return path
    return None


def weight_files(hf_dir: Path) -> list[Path]:
    """The files of a folder's weights.

    Raises:
        UserError: there are none, or not all.
    """
    index = hf_dir / INDEX_NAME
    if not index.is_file():
        single = hf_dir / SINGLE_NAME
        if not single.is_file():
            raise UserError(f"{hf_dir}: neither {SINGLE_NAME} nor {INDEX_NAME} is there; only safetensors can be read")
        return [single]
    files = [hf_dir / name for name in _indexed_files(index)]
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise UserError(f"{hf_dir}: {INDEX_NAME} names files which are not there: {_some(absent)}")
    return files


def _indexed_files(index: Path) -> list[str]:
    """The names of the files in which an index says that tensors are."""
    places = read_json_object(index).get("weight_map")
    names = list(places.values()) if isinstance(places, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{index}: 'weight_map' must say of every tensor which file has it; was it downloaded whole?")
    return sorted(set(names))


def _copy_small_files(origin: Path, work: Path) -> None:
    for path in sorted(origin.iterdir()):
        if path.is_file() and path.suffix in COPIED_SUFFIXES and not path.name.endswith(".index.json"):
            shutil.copyfile(path, work / path.name)


def _write_config(origin: Path, work: Path, plan: Sequence[HfTensor], dtype: str) -> None:
    config = read_json_object(origin / "config.json")
    config.pop("quantization_config", None)  # what is written are whole weights
    config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    config["vocab_size"] = next(tensor.shape[0] for tensor in plan if "embed_tokens" in tensor.name)
    (work / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _put_in_place(work: Path, directory: Path) -> None:
    """At no moment does ``directory`` hold a part of a model: the old one is moved away before it is deleted."""
    old = unfinished(directory, "old.tmp")
    if directory.exists():
        directory.rename(old)
    work.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def _remove_abandoned_work(directory: Path) -> None:
    """Removes what processes left that were killed while they wrote ``directory`` from this machine; a model that one
    had only moved away comes back."""
    for path in directory.parent.iterdir():
        owner = owner_of(path, directory.name)
        if owner in (Owner.SELF, Owner.DEAD) and path.name.endswith(".old.tmp") and not directory.exists():
            path.rename(directory)
        elif owner in (Owner.SELF, Owner.DEAD):
            shutil.rmtree(path, ignore_errors=True)
        elif owner is Owner.UNCLEAR:
            logger.warning("%s was left by %s; remove it if nobody writes there", path, owner.value)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMED_IN_MESSAGES])
    rest = len(names) - NAMED_IN_MESSAGES
    return f"{shown} and {rest} more" if rest > 0 else shown
