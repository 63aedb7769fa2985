"""The trainer leaves the device and comes back as it was. Each test that trains has a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training.harness import batch_of, config_of, make_samples, on_ranks, started
from vime.config import Config
from vime.errors import UserError
from vime.platform import current
from vime.training import offload
from vime.training.worker import TrainWorker

pytestmark = [
    pytest.mark.one_gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no device to leave"),
]
GIB = 2**30
DEADLINE_S = 60
LARGER = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 8}
"""85 million parameters with 18 bytes each: 1.43 GiB."""


@pytest.mark.parametrize("flags", [[], ["--use-distributed-optimizer"]], ids=["plain", "distributed optimizer"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_training_goes_on_as_if_nothing_had_moved(family: str, flags: list[str], model_of: Callable[..., Path]) -> None:
    config = config_of(model_of(family), "--lr", "1e-2", *flags)
    ((stays, leaves),) = on_ranks(1, gradient_norms, config, deadline_s=DEADLINE_S)
    assert stays[0] != stays[1] != stays[2], "each step has something to learn"
    assert leaves == pytest.approx(stays, rel=1e-2)  # the attention kernel's backward pass adds in any order


def gradient_norms(rank: int, world_size: int, config: Config) -> list[list[float]]:
    """Of three steps: in a worker that stays, and in one that leaves the device and comes back after each."""
    batches = [batch_of(make_samples(seed=seed), rollout_id=seed) for seed in range(3)]
    found = []
    for leaves in (False, True):
        with started(config) as worker:
            norms = []
            for batch in batches:
                norms.append(worker.train(batch).steps[0]["train/grad_norm"])
                if leaves:
                    leave_and_return(worker)
            found.append(norms)
    return found


def leave_and_return(worker: TrainWorker) -> None:
    """First by half: it is called back while copies are under way. Then all the way."""
    worker.shed()
    worker.begin_offload("rest")
    worker.begin_offload("parameters")
    worker.onload("parameters")
    worker.onload("rest")
    worker.offload("rest")
    worker.offload("parameters")
    assert not any(p.untyped_storage().size() for chunk in worker.chunks for p in chunk.parameters())
    worker.onload("parameters")
    worker.onload("rest")


@pytest.mark.parametrize("prepared", [False, True], ids=["made when needed", "prepared"])
def test_every_byte_returns(prepared: bool, model_of: Callable[..., Path]) -> None:
    """In pieces of which many are under way, over memory that others used meanwhile."""
    config = config_of(model_of("qwen3", **LARGER))
    assert on_ranks(1, bytes_return, config, prepared, deadline_s=DEADLINE_S) == [True]


def bytes_return(rank: int, world_size: int, config: Config, prepared: bool) -> bool:
    offload.PIECE_BYTES = 1 << 20
    with started(config) as worker:
        if prepared:
            worker.prepare_to_leave()
        worker.train(batch_of(make_samples()))
        held = [*(p.data for chunk in worker.chunks for p in chunk.parameters())]
        held += offload.optimizer_tensors(worker.optimizer)
        before = [tensor.clone().cpu() for tensor in held]
        for _ in range(2):
            leave_and_return(worker)
            worker.offload("rest")
            worker.offload("parameters")
            torch.full((GIB,), 7, dtype=torch.uint8, device="cuda")
            torch.cuda.empty_cache()
            worker.onload("parameters")
            worker.onload("rest")
        worker._offloader.arrive()
        return all(bool((tensor.cpu() == copy).all()) for tensor, copy in zip(held, before, strict=True))


def test_what_finds_no_room_on_its_way_back_comes_later(model_of: Callable[..., Path]) -> None:
    config = config_of(model_of("qwen3", **LARGER))
    ((said, returned),) = on_ranks(1, comes_later, config, deadline_s=DEADLINE_S)
    assert said.startswith("parameters of 0.2 GiB come back to a GPU that has 0.0 GiB free")
    assert returned


def comes_later(rank: int, world_size: int, config: Config) -> tuple[str, bool]:
    """What is said while others have the device, and whether every byte returns once they have gone."""
    with started(config) as worker:
        held = [p.data for chunk in worker.chunks for p in chunk.parameters()]
        before = [tensor.clone().cpu() for tensor in held]
        worker.offload("rest")
        worker.offload("parameters")
        others = torch.empty(current().free_bytes() - (32 << 20), dtype=torch.uint8, device="cuda")
        said = ""
        try:
            worker.onload("parameters")
        except UserError as error:
            said = str(error)
        worker.offload("parameters")
        del others
        torch.cuda.empty_cache()
        worker.onload("parameters")
        return said, all(bool((tensor.cpu() == copy).all()) for tensor, copy in zip(held, before, strict=True))


def test_next_to_nothing_of_it_stays(model_of: Callable[..., Path]) -> None:
    (held,) = on_ranks(1, held_bytes, config_of(model_of("qwen3", **LARGER)), deadline_s=DEADLINE_S)
    assert held["here"] > 1.4 * GIB
    assert held["away"] < 0.1 * GIB  # a workspace of cuBLAS takes 32 MiB
    assert held["given back"] > 1.3 * GIB, "others can have it"
    assert held["back"] == pytest.approx(held["here"], abs=0.1 * GIB)


def held_bytes(rank: int, world_size: int, config: Config) -> dict[str, int]:
    """Of a worker that has trained; "given back" is what the whole process does not hold any more."""
    held = {}
    with started(config) as worker:
        worker.train(batch_of(make_samples()))
        held["here"], reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        worker.offload("rest")
        worker.offload("parameters")
        held["away"], held["given back"] = torch.cuda.memory_allocated(), reserved - torch.cuda.memory_reserved()
        worker.onload("parameters")
        worker.onload("rest")
        held["back"] = torch.cuda.memory_allocated()
    return held


def test_host_memory_that_is_gone_leaves_its_place_to_others() -> None:
    """The system gives the place to whatever is mapped next; a lock that stayed would make copies fail."""
    size = 64 << 20
    on_device = torch.zeros(size, dtype=torch.uint8, device="cuda")
    for value in range(4):
        host = current().pinned(size)
        assert host.is_pinned()
        current().unpin(torch.empty(8))  # which never was: no error stays behind
        host.copy_(on_device.fill_(value), non_blocking=True)
        torch.cuda.synchronize()
        assert bool((host == value).all())
        del host
