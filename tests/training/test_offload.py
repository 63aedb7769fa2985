"""What is kept of a model while it is not on its device. Copies and the device are fakes: all is memory of the CPU."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from vime.errors import UserError
from vime.platform import current, device
from vime.training import offload
from vime.training.offload import Offloader


class Copies:
    """Copies at once, and works at once."""

    def beside(self, work: Any) -> None:
        work()

    def start(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for source, target in pairs:
            target.copy_(source)

    def arrive(self) -> None:
        pass

    finish = arrive


class Inner:
    """An optimizer of torch."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.param_groups = [{"params": parameters}]
        self.state: dict[Tensor, dict[str, Tensor]] = {}


class Optimizer:
    """One of Megatron, around it."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.optimizer = Inner(parameters)


class OnDevice(Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


def on_device(data: Tensor) -> Tensor:
    tensor: Tensor = data.as_subclass(OnDevice)
    return tensor


def chunk_of(*tensors: Tensor) -> Any:
    class Chunk:
        def parameters(self) -> list[Any]:
            return [type("Parameter", (), {"data": tensor})() for tensor in tensors]

    return Chunk()


def offloader(chunk: Any, optimizer: Any) -> Offloader:
    made = Offloader([chunk], optimizer)
    made._copies = Copies()  # type: ignore[assignment]
    return made


def full(monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
    """The device has room for so many storages more."""
    resize, left = torch.UntypedStorage.resize_, [after]

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        if size:
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resized)


def test_what_finds_no_room_on_its_way_back_is_still_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tried to come, the run goes on all the same, and it comes later: with every byte."""
    values = [torch.arange(1000.0), torch.arange(500.0)]
    tensors = [on_device(each.clone()) for each in values]
    mover = offloader(chunk_of(*tensors), Optimizer([]))
    mover.offload("parameters")
    assert [each.untyped_storage().nbytes() for each in tensors] == [0, 0]
    with monkeypatch.context() as patch:
        full(patch, after=1)
        with pytest.raises(UserError, match=r"^parameters of 0\.0 GiB come back to a GPU that has \d+\.\d GiB free: a"):
            mover.onload("parameters")
    assert [each.untyped_storage().nbytes() for each in tensors] == [0, 0], "no half of it takes memory"
    mover.offload("parameters")
    mover.onload("parameters")
    assert all(torch.equal(each.as_subclass(Tensor), value) for each, value in zip(tensors, values, strict=True))


@pytest.mark.parametrize("separate", [True, False], ids=["main weights", "float32"])
def test_host_memory_is_prepared_for_moments_too(separate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are no main weights, because the parameters are as wide."""
    parameter = on_device(torch.zeros(256, dtype=torch.bfloat16 if separate else torch.float32))
    changed = on_device(torch.zeros(256)) if separate else parameter
    optimizer = Optimizer([changed])
    mover = offloader(chunk_of(parameter), optimizer)
    made: list[int] = []
    pinned = type(current()).pinned
    monkeypatch.setattr(type(current()), "pinned", lambda self, size: made.append(size) or pinned(self, size))
    mover.prepare()
    assert made == [(512 + 3 * 1024) if separate else 3 * 1024]
    optimizer.optimizer.state[changed] = {name: on_device(torch.zeros(256)) for name in ("exp_avg", "exp_avg_sq")}
    for part in offload.PARTS:
        mover.offload(part)
    assert len(made) == 1, "there was room for all"


def test_memory_that_the_machine_does_not_give_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, **named: Any) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(device, "_Lockable", refused)
    mover = offloader(chunk_of(on_device(torch.zeros(256))), Optimizer([]))
    with pytest.raises(
        UserError, match=r"^the machine gives a process no 0\.0 GiB of host memory, .*: Cannot allocate"
    ):
        mover.prepare()


def test_what_the_machine_says_is_free_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of some machines grows as it is used."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 0, "total": 0})())
    mover = offloader(chunk_of(on_device(torch.zeros(256))), Optimizer([]))
    mover.prepare()
    mover.offload("parameters")
