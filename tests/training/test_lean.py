"""Cheap outputs that are not kept: the same gradients, from a second computation in the backward pass."""

from __future__ import annotations

import torch

from vime.training.layers.lean import cheap, lean


def test_an_output_is_computed_again_for_the_backward_pass_and_not_kept() -> None:
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    expected = torch.autograd.grad((x.tanh() @ weight.t()).sum(), (x, weight))
    again = []

    def compute() -> torch.Tensor:
        again.append(1)
        return x.detach().tanh()

    y = cheap(x.tanh(), compute)
    with lean(y):
        out = torch.nn.functional.linear(y, weight)
    del y
    assert not again
    found = torch.autograd.grad(out.sum(), (x, weight))
    assert again == [1]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_other_tensors_and_passes_without_gradients_are_left_alone() -> None:
    x, weight = torch.randn(5, 4), torch.randn(3, 4, requires_grad=True)

    def never() -> torch.Tensor:
        raise AssertionError("nothing has to be computed again")

    with lean(x):
        torch.nn.functional.linear(x, weight).sum().backward()
    with torch.no_grad(), lean(cheap(x.clone(), never)):
        torch.nn.functional.linear(x, weight)
    with lean(cheap(x.clone(), never)):
        torch.nn.functional.linear(x, weight).sum().backward()
