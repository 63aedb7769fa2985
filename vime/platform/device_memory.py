"""Memory of a GPU that one process writes and others on the same GPU read: nothing passes through the host.

CUDA lets a process map memory of another one on the same device (cuIpcGetMemHandle and cuIpcOpenMemHandle of the CUDA
driver API). torch offers the same for tensors it sends to processes, but counts readers in files: memory whose reader
was killed would never be free again. Here the memory is the writer's, until it closes it.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from vime.platform.cuda_driver import DriverError, call

__all__ = ["DeviceBuffer", "device_id", "open_device"]

HANDLE_BYTES = 64  # sizeof(CUipcMemHandle)
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag that there is
BLOCK_BYTES = 2 << 20
"""CUDA may take less than this out of a larger block, which would then be shared as a whole."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


class DeviceBuffer:
    """``size`` bytes of the current device, outside of torch's allocator: all are given back by ``close``.

    Raises:
        DriverError: there is no room, or the driver does not share memory.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        address = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(-(-max(size, 1) // BLOCK_BYTES) * BLOCK_BYTES))
        self._memory = _Memory(address.value, size)
        handle = _Handle()
        try:
            call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        except DriverError:
            self.close()
            raise
        self.handle = base64.b64encode(bytes(handle)).decode()
        self.data = torch.as_tensor(self._memory, device=torch.device("cuda", torch.cuda.current_device()))

    def close(self) -> None:
        """Waits for the device and frees the memory. Nothing may use ``data`` afterwards. Idempotent."""
        if self._memory.address:
            self.data = torch.empty(0, dtype=torch.uint8)
            torch.cuda.synchronize()
            call("cuMemFree_v2", ctypes.c_uint64(self._memory.address))
            self._memory.address = 0


def open_device(handle: str, size: int) -> Tensor:
    """Maps ``size`` bytes of another process's DeviceBuffer, which is on this process's current device.

    It is not to be written to. The mapping ends with the tensor's last view; the buffer must live so long.

    Raises:
        DriverError: the memory is gone, on another device, or the system does not let processes share it.
        ValueError: that is no handle.
    """
    try:
        raw = base64.b64decode(handle, validate=True)
    except binascii.Error:
        raw = b""
    if len(raw) != HANDLE_BYTES:
        raise ValueError(f"{handle!r} is no handle of device memory, which is {HANDLE_BYTES} bytes in base64")
    address = ctypes.c_uint64()
    call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(raw), LAZY_PEER_ACCESS)
    return torch.as_tensor(_Mapping(address.value, size), device=torch.device("cuda", torch.cuda.current_device()))


def device_id() -> str:
    """What all processes call the current device, whatever number it has among those that they see."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


class _Memory:
    """Device memory in the form that torch makes a tensor of without a copy (``__cuda_array_interface__``)."""

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


class _Mapping(_Memory):
    """Of another process's memory; a tensor made of it keeps it."""

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of the process the driver may have gone before
            torch.cuda.synchronize()  # kernels may still read
            call("cuIpcCloseMemHandle", ctypes.c_uint64(self.address))
