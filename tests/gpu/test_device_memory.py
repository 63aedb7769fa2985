"""Memory of a GPU between two processes. CUDA shares no memory between a process and itself, so a child reads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from vime.platform.cuda_driver import DriverError
from vime.platform.device_memory import DeviceBuffer, device_id, open_device
from vime.weights.checksum import checksum

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU to share")

SIZE = 64 << 20
READ = """
import sys, torch
from vime.weights.checksum import checksum
from vime.platform.device_memory import device_id, open_device
data = open_device(sys.argv[1], int(sys.argv[2]))
print(device_id(), int(checksum(data)))
"""


def read(handle: str, size: int = SIZE) -> list[str]:
    """What a process finds there: the name of its device, and the checksum; or the last line of its error."""
    child = subprocess.run(
        [sys.executable, "-c", READ, handle, str(size)], capture_output=True, text=True, timeout=100, check=False
    )
    return child.stdout.split() if child.returncode == 0 else [child.stderr.splitlines()[-1]]


@pytest.fixture
def buffer() -> Iterator[DeviceBuffer]:
    buffer = DeviceBuffer(SIZE)
    buffer.data.view(torch.int64).random_()
    torch.cuda.synchronize()
    yield buffer
    buffer.close()


def test_another_process_reads_what_was_written(buffer: DeviceBuffer) -> None:
    expected = [device_id(), str(int(checksum(buffer.data)))]
    assert read(buffer.handle) == expected
    buffer.data.view(torch.int64).random_()
    torch.cuda.synchronize()
    assert read(buffer.handle) == [device_id(), str(int(checksum(buffer.data)))] != expected


def test_small_buffers_do_not_share_a_block() -> None:
    """CUDA would cut both out of one, and a handle is the whole block's."""
    size = (1 << 20) + 256
    first, second = DeviceBuffer(size), DeviceBuffer(size)
    try:
        for value, each in enumerate((first, second)):
            each.data.fill_(value + 1)
        torch.cuda.synchronize()
        for each in (first, second):
            assert read(each.handle, size) == [device_id(), str(int(checksum(each.data)))]
    finally:
        first.close()
        second.close()


def test_all_is_given_back_and_nothing_is_left_to_read(buffer: DeviceBuffer) -> None:
    handle, free = buffer.handle, torch.cuda.mem_get_info()[0]
    buffer.close()
    buffer.close()
    assert torch.cuda.mem_get_info()[0] - free >= SIZE
    (error,) = read(handle)
    assert error.startswith("vime.platform.cuda_driver.DriverError: cuIpcOpenMemHandle_v2 of the CUDA driver:")


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(DriverError, match=r"cuMemAlloc_v2 of the CUDA driver: out of memory \(error 2\)"):
        DeviceBuffer(1 << 45)
    with pytest.raises(ValueError, match="'nonsense' is no handle of device memory, which is 64 bytes in base64"):
        open_device("nonsense", SIZE)
