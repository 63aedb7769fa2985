"""Samples that one generate call made of one: an exact loss wherever the children are, against plain PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.harness import config_of, free_port, make_children, on_ranks, started
from tests.training.test_step import GRADIENT_TOLERANCE, forward, gradients_by_hf_name, load_reference
from vime.data.batching import make_train_batches
from vime.types import CHILD_STRIDE, RolloutBatch, TrainBatch, TrainSample

FLAGS = ["--fp32", "--clip-grad", "0", "--entropy-coef", "0.01"]
HOOK = ["--rollout-data-postprocess-path", f"{__name__}:mask_a_child"]


def mask_a_child(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """The last child of sample 0, on whichever rank it is."""
    for index, mask in zip(rollout_data["sample_indices"], rollout_data["loss_masks"], strict=True):
        if index == 2 * CHILD_STRIDE:
            mask.zero_()


def written_out(model: Any, samples: Sequence[TrainSample], *, per_token: bool = False) -> torch.Tensor:
    """``1/N Σ_i [Σ_c Σ_t m (-A log π - 0.01 H) / max(Σ_c Σ_t m, 1)]`` over drawn samples i and their children c; its
    gradient is that of the loss, whose ratio is 1 before the first step."""
    tokens: Counter[int] = Counter()
    for sample in samples:
        tokens[sample.origin] += sample.trained_tokens
    total = torch.zeros(())
    for sample in samples:
        log_probs, entropy = forward(model, sample)
        loss = -sample.reward * (log_probs - log_probs.detach()).exp() - 0.01 * entropy
        share = 1 if per_token else max(tokens[sample.origin], 1) * len(tokens)
        total = total + (loss * torch.tensor(sample.loss_mask)).sum() / share
    return total / sum(max(sample.trained_tokens, 1) for sample in samples) if per_token else total


def shares(samples: Sequence[TrainSample], dp_size: int, **options: Any) -> list[TrainBatch]:
    return make_train_batches(
        RolloutBatch(rollout_id=0, samples=tuple(samples)), dp_size=dp_size, global_batch_size=4, **options
    )


def step_on_rank(rank: int, world_size: int, model: Path, works: Sequence[Any]) -> list[Any]:
    """Loss and gradient of each piece of work: flags, port, and one batch a rank."""
    found = []
    for flags, port, batches in works:
        config = config_of(model, "--actor-num-gpus-per-node", str(world_size), *FLAGS, *flags)
        with started(config, rank=rank, world_size=world_size, port=port) as worker:
            (metrics,) = worker.train(batches[rank]).steps
            found.append((metrics["train/loss"], gradients_by_hf_name(worker)))
    return found


def check(
    found: tuple[float, dict[str, torch.Tensor]], model: Path, samples: Sequence[TrainSample], **how: Any
) -> None:
    reference = load_reference(model)
    loss = written_out(reference, samples, **how)
    loss.backward()
    assert found[0] == pytest.approx(loss.item(), rel=1e-5)
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    difference = sum((found[1][name] - gradient).square().sum() for name, gradient in wanted.items()).sqrt()
    norm = sum(gradient.square().sum() for gradient in wanted.values()).sqrt()
    assert difference / norm < GRADIENT_TOLERANCE


def masked_afterwards() -> list[TrainSample]:
    """As ``mask_a_child`` leaves them."""
    return [
        replace(s, loss_mask=(0,) * s.response_length) if s.index == 2 * CHILD_STRIDE else s for s in make_children()
    ]


@pytest.mark.parametrize("per_token", [False, True], ids=["per sample", "per token"])
def test_children_share_one_denominator(model_of: Callable[..., Path], per_token: bool) -> None:
    model, samples = model_of(), make_children()
    flags = ["--calculate-per-token-loss"] * per_token
    (batch,) = shares(samples, 1, micro_batch_size=2)
    assert len(batch.samples) == 8, "an idle one fills the last micro-batch"
    (found,) = step_on_rank(0, 1, model, [(flags, free_port(), [batch])])
    check(found, model, samples, per_token=per_token)


def test_children_on_different_ranks_share_it_too_also_when_a_hook_changes_their_masks(
    model_of: Callable[..., Path],
) -> None:
    model, samples = model_of(), make_children()
    spread = shares(samples, 2)
    assert {s.index for s in spread[0].samples} == {0, 2 * CHILD_STRIDE, 2, 3}, "of sample 0 one child is elsewhere"
    dense = shares(samples, 2, use_dynamic_batch_size=True, max_tokens_per_gpu=40, balance_data=True)
    works = [([], free_port(), spread), ([], free_port(), dense), (HOOK, free_port(), spread)]
    for plain, packed, hooked in on_ranks(2, step_on_rank, model, works):
        check(plain, model, samples)
        check(packed, model, samples)
        check(hooked, model, masked_afterwards())
