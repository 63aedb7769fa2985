"""A whole model on the kernels computes what it does without them. On a CPU, kernels run in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.training.harness import batch_of, config_of, make_samples, started
from vime.platform import current, device

pytest.importorskip("triton", reason="Triton is installed with torch for GPUs only")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU every test runs on the kernels")


@contextmanager
def kernels(used: bool) -> Iterator[None]:
    honest = device.CPU
    device.CPU = dataclasses.replace(honest, fused_kernels=used)
    current.cache_clear()
    try:
        yield
    finally:
        device.CPU = honest
        current.cache_clear()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "glm4", "qwen3_moe", "glm4_moe"])
def test_a_step_on_kernels_is_the_step_without(family: str, model_of: Callable[..., Path]) -> None:
    """llama: no norm of heads; qwen2: biases; qwen3: norms of heads; glm4: a part of each head is rotated."""
    found = []
    for used in (False, True):
        with kernels(used), started(config_of(model_of(family), "--fp32", "--entropy-coef", "0.01")) as worker:
            samples = make_samples(4, masked=True)
            (log_probs,) = worker._log_probs([worker._packer.pack(samples)])
            found.append((log_probs, worker.train(batch_of(samples)).steps[0]))
    (plain, metrics), (fused, fused_metrics) = found
    assert (plain - fused).abs().max() < 1e-5
    names = [name for name in metrics if not name.startswith("perf/")]
    assert {name: fused_metrics[name] for name in names} == pytest.approx(
        {n: metrics[n] for n in names}, rel=1e-4, abs=1e-6
    )
