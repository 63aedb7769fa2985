"""The trainer leaves the device and comes back as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training.harness import batch_of, config_of, make_samples, started

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no device to leave")


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
