"""Reading and writing the weights of a HuggingFace model folder, tensor by tensor, without transformers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.errors import UserError
from vime.models.rules import HfTensor

if TYPE_CHECKING:
    from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_SHARD_BYTES = 5_000_000_000  # as transformers writes them
NAMED_IN_MESSAGES = 5
COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")  # all of a model folder but its weights


class HfWeights:
    """The tensors of one folder. Headers are read at once, data only on demand and only the rows that are asked for."""

    def __init__(self, hf_dir: Path) -> None:
        from safetensors import safe_open

        self.hf_dir = hf_dir
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}  # tensor name -> open file
        for path in _weight_files(hf_dir):
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            self._files |= dict.fromkeys(file.keys(), file)

    def __enter__(self) -> HfWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> Tensor:
        """The tensor, or its rows (dim 0) or columns (dim 1) from ``start`` to ``stop``."""
        tensor: Tensor
        if dim is None:
            tensor = self._files[name].get_tensor(name)
        elif dim == 0:
            tensor = self._files[name].get_slice(name)[start:stop]
        else:
            tensor = self._files[name].get_slice(name)[:, start:stop]
        return tensor

    def check(self, expected: Sequence[HfTensor], *, ignorable: Collection[str] = ()) -> None:
        """Compares names and shapes with what the architecture has.

        Args:
            ignorable: names that may be there although nothing needs them.

        Raises:
            UserError: tensors are missing, unexpected or of another shape; the message names them.
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
        problems = [
            ("missing tensors", missing),
            ("unexpected tensors", unexpected),
            ("tensors of a wrong shape", wrong),
        ]
        told = "; ".join(f"{what}: {_some(items)}" for what, items in problems if items)
        if told:
            raise UserError(f"{self.hf_dir}: the weights do not fit its config.json: {told}")


def write_hf_folder(
    directory: Path, *, origin: Path, plan: Sequence[HfTensor], tensors: Iterable[tuple[str, Tensor]], dtype: str
) -> None:
    """Writes a complete model folder: weights, config.json with ``dtype``, and the other files of ``origin``.

    The folder appears at once, when everything is in it. One from before is replaced if it is a model folder too.

    Args:
        plan: all tensors in the order in which ``tensors`` gives them.
        dtype: name of the dtype of every tensor, e.g. "bfloat16".

    Raises:
        UserError: ``directory`` holds something that is not a model, or is ``origin`` itself.
    """
    check_replaceable(directory, origin)
    directory.parent.mkdir(parents=True, exist_ok=True)
    work = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        _copy_small_files(origin, work)
        _write_config(origin, work, plan, dtype)
        _write_weights(work, plan, tensors, itemsize=_itemsize(dtype))
        if directory.exists():
            shutil.rmtree(directory)
        work.rename(directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_replaceable(directory: Path, origin: Path) -> None:
    """Raises a UserError unless a model may be written to ``directory``."""
    if directory.resolve() == origin.resolve():
        raise UserError(f"{directory}: is the original model's folder; write to another one")
    if directory.is_file():
        raise UserError(f"{directory}: is a file; a folder can be written there only if nothing has its name")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / "config.json").is_file():
        raise UserError(f"{directory}: is not empty and not a model folder; it is left alone, name another one")


def _weight_files(hf_dir: Path) -> list[Path]:
    index = hf_dir / INDEX_NAME
    if not index.is_file():
        single = hf_dir / SINGLE_NAME
        if not single.is_file():
            raise UserError(f"{hf_dir}: neither {SINGLE_NAME} nor {INDEX_NAME} is there; only safetensors can be read")
        return [single]
    files = sorted({hf_dir / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise UserError(f"{hf_dir}: {INDEX_NAME} names files which are not there: {_some(absent)}")
    return files


def _copy_small_files(origin: Path, work: Path) -> None:
    for path in sorted(origin.iterdir()):
        if path.is_file() and path.suffix in COPIED_SUFFIXES and not path.name.endswith(".index.json"):
            shutil.copyfile(path, work / path.name)


def _write_config(origin: Path, work: Path, plan: Sequence[HfTensor], dtype: str) -> None:
    config = json.loads((origin / "config.json").read_text(encoding="utf-8"))
    config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    config["vocab_size"] = next(tensor.shape[0] for tensor in plan if "embed_tokens" in tensor.name)
    (work / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(
    work: Path, plan: Sequence[HfTensor], tensors: Iterable[tuple[str, Tensor]], *, itemsize: int
) -> None:
    from safetensors.torch import save_file

    shards = list(_shards(plan, itemsize))
    given = iter(tensors)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        held = {}
        for expected in shard:
            name, tensor = next(given)
            assert (name, tuple(tensor.shape)) == (expected.name, expected.shape), (name, tensor.shape, expected)
            held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        save_file(held, work / file, metadata={"format": "pt"})
        shutil.copymode(work / "config.json", work / file)  # safetensors lets only the owner read it
        weight_map |= dict.fromkeys(held, file)
    assert next(given, None) is None, "more tensors than planned"
    if len(shards) > 1:
        size = sum(math.prod(tensor.shape) for tensor in plan) * itemsize
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (work / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(plan: Sequence[HfTensor], itemsize: int) -> Iterator[list[HfTensor]]:
    shard: list[HfTensor] = []
    size = 0
    for tensor in plan:
        tensor_bytes = math.prod(tensor.shape) * itemsize
        if shard and size + tensor_bytes > MAX_SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor_bytes
    yield shard


def _itemsize(dtype: str) -> int:
    import torch

    size: int = getattr(torch, dtype).itemsize
    return size


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMED_IN_MESSAGES])
    rest = len(names) - NAMED_IN_MESSAGES
    return f"{shown} and {rest} more" if rest > 0 else shown
