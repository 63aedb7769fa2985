"""The CUDA driver's own functions, where torch has none, or one that leaves an error behind for whoever comes next."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

__all__ = ["DriverError", "call"]


class DriverError(RuntimeError):
    """A function of the driver failed; the message says which and why."""


def call(function: str, *arguments: Any) -> None:
    """Calls it, in the context that torch uses on this thread's current device.

    Raises:
        DriverError: its status is not 0.
    """
    torch.cuda.current_stream().query()  # torch makes its context the thread's own
    status = getattr(_driver(), function)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        why = (text.value or b"an unknown error").decode()
        raise DriverError(f"{function} of the CUDA driver: {why} (error {status})")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
