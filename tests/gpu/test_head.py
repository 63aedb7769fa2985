"""The output layer on a GPU: logits in float32, and its gradient added to Megatron's buffer by the product itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training.harness import batch_of, config_of, make_samples, make_step, started
from tests.training.layouts import whole_gradients
from vime.models import weight_map
from vime.training.logprobs import Vocabulary, token_log_probs

pytestmark = [
    pytest.mark.one_gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has neither"),
]


def test_no_logit_is_rounded() -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16) for rows in (33, 5003))
    targets = torch.randint(5003, (33,), device="cuda")
    found = token_log_probs(hidden, weight, targets, Vocabulary(0, 5003)).log_probs_t
    exact = torch.log_softmax(hidden.double() @ weight.double().t(), -1).gather(1, targets[:, None])[:, 0]
    assert (found - exact).abs().max() < 1e-4  # of logits around 16; in bfloat16 they would be 0.03 off


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_gradients_are_those_that_autograd_adds(model_of: Callable[..., Path], tied: bool) -> None:
    """Of every parameter, over two micro-batches: an embedding that is the output layer too gets both parts."""
    found = []
    for flags in ([], ["--no-gradient-accumulation-fusion"]):
        with started(config_of(model_of("qwen3", tied=tied), "--clip-grad", "0", *flags)) as worker:
            samples = make_samples(8)
            worker.train(batch_of(samples, make_step(samples, range(4), range(4, 8))))
            found.append(whole_gradients(worker, weight_map(worker.shape)))
    for name, gradient in found[1].items():
        assert (found[0][name] - gradient).norm() < 0.02 * gradient.norm(), name
