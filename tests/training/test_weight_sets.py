"""Sets of weights in host memory, on whatever device there is. The model is one of torch, not Megatron's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vime.platform import current
from vime.platform.device import Platform
from vime.training import weight_sets
from vime.training.weight_sets import WeightSets


class Model(torch.nn.Module):
    """Tensors of several dtypes and sizes, also none and one of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.zeros(33, 7, dtype=torch.bfloat16))
        self.bias = torch.nn.Parameter(torch.zeros(5))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", torch.zeros(0, 3))

    def fill(self, value: int) -> None:
        for tensor in self.state_dict().values():
            tensor.fill_(value)

    def values(self) -> set[float]:
        return {float(value) for tensor in self.state_dict().values() for value in tensor.flatten().tolist()}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the pieces of host memory that were made."""
    sizes: list[int] = []
    pinned = Platform.pinned
    monkeypatch.setattr(Platform, "pinned", lambda self, size: sizes.append(size) or pinned(self, size))
    return sizes


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(weight_sets, "global_parameters", lambda chunks: chunks[0].state_dict(keep_vars=True))
    return Model().to(current().device())


def test_the_model_has_a_set_for_as_long_as_it_is_used(model: Model) -> None:
    sets = WeightSets([model])
    places = [tensor.data_ptr() for tensor in model.state_dict().values()]
    for value in (1, 2):
        model.fill(value)
        sets.keep(f"set {value}")
    model.fill(3)
    for value in (2, 1, 2):
        with sets.use(f"set {value}"):
            assert model.values() == {value}
            assert model.matrix.shape == (33, 7)
        assert model.values() == {3}
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == places


def test_a_set_takes_one_piece_of_memory_and_the_next_one_takes_it_over(model: Model, made: list[int]) -> None:
    """512 bytes of the matrix with its padding, and 256 of each of the two others that have any."""
    sets = WeightSets([model])
    for value in range(4):  # as the reference of --ref-update-interval
        model.fill(value)
        sets.keep("reference")
    for version in range(4):  # as the sets of --keep-old-actor: the new one is there before the old one goes
        model.fill(10 + version)
        sets.keep(f"version {version}")
        if version:
            sets.drop(f"version {version - 1}")
            assert f"version {version - 1}" not in sets
    assert made == [1024] * 3
    with sets.use("reference"):
        assert model.values() == {3}
    with sets.use("version 3"):
        assert model.values() == {13}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU copies nothing")
def test_memory_is_locked_and_copies_are_in_the_order_of_what_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is busy, so each copy would come too late if nobody waited for it."""
    weight = torch.zeros(64 << 20, device="cuda")
    monkeypatch.setattr(weight_sets, "global_parameters", lambda chunks: {"weight": weight})
    sets = WeightSets([None])
    seen: list[Tensor] = []
    for value in range(4):
        torch.cuda._sleep(50_000_000)
        weight.fill_(value)
        sets.keep("set")
        weight.fill_(-1.0)
        with sets.use("set"):
            torch.cuda._sleep(50_000_000)
            seen.append((weight == value).all())
    kept: Any = sets._sets["set"]
    assert kept.is_pinned()
    assert all(bool(each) for each in seen)
