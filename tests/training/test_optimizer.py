"""GroupAdam takes the steps of torch's AdamW."""

from __future__ import annotations

import pytest
import torch

from vime.training.optimizer import GroupAdam


def test_steps_are_those_of_torch_adamw() -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)]
    ours, theirs = ([weight.clone().requires_grad_() for weight in start] for _ in range(2))
    settings = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}
    optimizers = [GroupAdam(ours, **settings), torch.optim.AdamW(theirs, **settings)]
    for _ in range(5):
        gradients = [torch.randn(weight.shape, generator=generator) for weight in start]
        for weights, optimizer in zip((ours, theirs), optimizers, strict=True):
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient.clone()
            optimizer.step()
    for weight, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-6)


def test_steps_are_counted_in_the_group_and_not_in_the_state() -> None:
    """That is the shape that Megatron's distributed checkpoints can load."""
    weight = torch.ones(3, requires_grad=True)
    optimizer = GroupAdam([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
    assert set(optimizer.state[weight]) == {"exp_avg", "exp_avg_sq"}


def test_coupled_weight_decay_is_refused() -> None:
    with pytest.raises(ValueError, match="only AdamW"):
        GroupAdam([torch.ones(1, requires_grad=True)], adam_w_mode=False)
