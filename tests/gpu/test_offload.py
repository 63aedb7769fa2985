"""The trainer leaves the device and comes back as it was."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training.harness import batch_of, config_of, make_samples, started
from vime.platform import current

pytestmark = [
    pytest.mark.one_gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no device to leave"),
]
GIB = 2**30
LARGER = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 8}
"""85 million parameters with 18 bytes each: 1.43 GiB."""


@pytest.mark.parametrize("flags", [[], ["--use-distributed-optimizer"]], ids=["plain", "distributed optimizer"])
def test_training_goes_on_as_if_nothing_had_moved(model_of: Callable[..., Path], flags: list[str]) -> None:
    batches = [batch_of(make_samples(seed=seed), rollout_id=seed) for seed in range(3)]
    found = []
    for leaves in (False, True):
        with started(config_of(model_of("qwen3"), "--lr", "1e-2", *flags)) as worker:
            norms = []
            for batch in batches:
                norms.append(worker.train(batch).steps[0]["train/grad_norm"])
                if leaves:
                    worker.offload("rest")
                    worker.offload("parameters")
                    assert not any(p.untyped_storage().size() for chunk in worker.chunks for p in chunk.parameters())
                    worker.onload("parameters")
                    worker.onload("rest")
            found.append(norms)
    assert found[1] == pytest.approx(found[0], rel=1e-2)  # the attention kernel's backward pass adds in any order


def test_next_to_nothing_of_it_stays(model_of: Callable[..., Path]) -> None:
    model = model_of("qwen3", **LARGER)
    gc.collect()
    before = torch.cuda.memory_allocated()
    with started(config_of(model)) as worker:
        worker.train(batch_of(make_samples()))
        here = torch.cuda.memory_allocated() - before
        used = used_bytes()
        worker.offload("rest")
        worker.offload("parameters")
        away = torch.cuda.memory_allocated() - before
        given_back = used - used_bytes()
        worker.onload("parameters")
        worker.onload("rest")
        back = torch.cuda.memory_allocated() - before
    assert here > 1.4 * GIB
    assert away < 0.1 * GIB  # a workspace of cuBLAS takes 32 MiB
    assert given_back > 1.3 * GIB, "others can have it"
    assert back == pytest.approx(here, abs=0.1 * GIB)


def used_bytes() -> int:
    """Of the device, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_host_memory_that_is_gone_leaves_its_place_to_others() -> None:
    """The system gives the place to whatever is mapped next; a lock that stayed would make copies fail."""
    size = 64 << 20
    on_device = torch.zeros(size, dtype=torch.uint8, device="cuda")
    for value in range(4):
        host = current().pinned(size)
        assert host.is_pinned()
        host.copy_(on_device.fill_(value), non_blocking=True)
        torch.cuda.synchronize()
        assert bool((host == value).all())
        del host
