"""One safetensors file (https://huggingface.co/docs/safetensors), read and written tensor by tensor.

The library of that name maps whole files and writes whole dicts; here no more than one tensor is in memory at a time.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.errors import UserError
from vime.files import writing
from vime.models.piecewise import PiecewiseFile

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["SafetensorsFile", "TensorInfo", "write_safetensors"]

LENGTH_BYTES = 8  # before the header: how long it is, little-endian
MAX_HEADER_BYTES = 100_000_000  # as the library has it
ALIGNMENT = 8  # of the data's beginning
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip
"""The file's names of torch's dtypes."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the header says of one tensor."""

    dtype: str  # torch's name
    shape: tuple[int, ...]
    start: int  # of its bytes, in the file
    stop: int

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


class SafetensorsFile:
    """Reads one file. The header is read at once, data on demand. Close it, or use it as a context manager.

    Raises:
        UserError: the file is cut off or not in the format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            self.tensors: Mapping[str, TensorInfo] = self._read_header()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(f"{path}: is not a whole safetensors file") from None

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """A tensor, or its rows from ``rows[0]`` up to ``rows[1]``, in memory of its own."""
        import torch

        info = self.tensors[name]
        shape, start, stop = info.shape, info.start, info.stop
        if rows is not None:
            row_bytes = (stop - start) // max(shape[0], 1)
            start, stop = start + rows[0] * row_bytes, start + rows[1] * row_bytes
            shape = (rows[1] - rows[0], *shape[1:])
        raw = torch.empty(stop - start, dtype=torch.uint8)
        self._fill(_bytes_of(raw), start)
        return raw.view(info.torch_dtype).reshape(shape)

    def _fill(self, buffer: memoryview, position: int) -> None:
        while buffer:
            count = os.preadv(self._descriptor, [buffer], position)
            if not count:
                raise UserError(f"{self.path}: ends too early; was it downloaded completely?")
            buffer, position = buffer[count:], position + count

    def _read_header(self) -> dict[str, TensorInfo]:
        size = os.fstat(self._descriptor).st_size
        length = int.from_bytes(os.pread(self._descriptor, LENGTH_BYTES, 0), "little")
        data = LENGTH_BYTES + length
        if not 0 < length <= MAX_HEADER_BYTES or data > size:
            raise ValueError("no header")
        header = json.loads(os.pread(self._descriptor, length, LENGTH_BYTES))
        header.pop("__metadata__", None)
        return {name: _info(entry, data, size) for name, entry in header.items()}


def _info(entry: Mapping[str, Any], data: int, size: int) -> TensorInfo:
    import torch

    start, stop = (data + offset for offset in entry["data_offsets"])
    info = TensorInfo(DTYPES[entry["dtype"]], tuple(entry["shape"]), start, stop)
    whole = math.prod(info.shape) * getattr(torch, info.dtype).itemsize
    if not data <= start <= stop <= size or stop - start != whole:
        raise ValueError("not within the file")
    return info


def write_safetensors(
    path: Path, plan: Sequence[tuple[str, str, Sequence[int]]], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Writes a file while ``tensors`` yields its contents.

    Args:
        plan: name, torch's name of the dtype and shape of each tensor, in the order in which they come.

    Raises:
        UserError: the file cannot be written, e.g. because the disk is full.
    """
    places, header = _layout(plan)
    with writing(path):
        file = open(path, "wb", buffering=0)  # noqa: SIM115 (closed below)
    with file:
        with writing(path):
            PiecewiseFile(file).write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
        for (name, dtype, shape), (given, tensor) in zip(plan, tensors, strict=True):
            assert (given, str(tensor.dtype), tuple(tensor.shape)) == (name, f"torch.{dtype}", tuple(shape)), (
                given, tensor.dtype, tensor.shape, name, dtype, shape,
            )  # fmt: skip
            file.seek(LENGTH_BYTES + len(header) + places[name])
            data = _bytes_of(tensor)
            with writing(path):
                PiecewiseFile(file).write(data)


def _layout(plan: Sequence[tuple[str, str, Sequence[int]]]) -> tuple[dict[str, int], bytes]:
    """Where each tensor's bytes begin behind the header, and the header. Wide dtypes come first: all are aligned."""
    import torch

    known = {dtype: name for name, dtype in DTYPES.items()}
    places: dict[str, int] = {}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in sorted(plan, key=lambda entry: -getattr(torch, entry[1]).itemsize):
        places[name] = end
        end += math.prod(shape) * getattr(torch, dtype).itemsize
        header[name] = {"dtype": known[dtype], "shape": list(shape), "data_offsets": [places[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    return places, text + b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's memory itself, if it is contiguous and on the CPU."""
    import torch

    array: Any = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
