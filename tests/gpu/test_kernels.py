"""Each Triton kernel against the same formula in float64, on ragged sizes: values and gradients."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is installed with torch for GPUs only")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-6  # relative, float32 against float64


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, requires_grad=True)


def far(found: Tensor, expected: Tensor) -> float:
    """Relative distance."""
    return float((found.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())


def doubles(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def assert_same(
    found: Sequence[Tensor], inputs: Sequence[Tensor], expected: Sequence[Tensor], exact_inputs: Sequence[Tensor]
) -> None:
    """Values, and gradients of a random linear function of them."""
    for one, other in zip(found, expected, strict=True):
        assert far(one, other) < TOLERANCE
    directions = [torch.randn_like(each) for each in found]
    gradients = torch.autograd.grad(list(found), inputs, directions)
    exact = torch.autograd.grad(list(expected), exact_inputs, [each.double() for each in directions])
    for one, other in zip(gradients, exact, strict=True):
        assert far(one, other) < TOLERANCE


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def exact_rotation(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    return torch.cat((torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1), rest), -1)


@pytest.mark.parametrize("shape", [(37, 100), (5, 3, 128), (9, 2560)], ids=str)
def test_norm(shape: tuple[int, ...]) -> None:
    from vime.training.kernels.rms_norm import rms_norm

    inputs = [random(*shape), random(shape[-1])]
    exact = doubles(inputs)
    assert_same([rms_norm(*inputs, 1e-6)], inputs, [exact_norm(*exact)], exact)


def test_swiglu() -> None:
    from vime.training.kernels.swiglu import swiglu

    x = random(7, 2, 600)
    (exact,) = doubles([x])
    gate, up = exact.chunk(2, -1)
    assert_same([swiglu(x)], [x], [torch.nn.functional.silu(gate) * up], [exact])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [64, 96], ids=["a part of the head", "the whole head"])
def test_rotation_of_a_view(interleaved: bool, width: int) -> None:
    from vime.training.kernels.rotary import rotated

    x = torch.randn(11, 6, 200, device=DEVICE)[:, 1:4, 40:136]
    angles = torch.randn(11, 1, width // 2, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    found = rotated(x, cos, sin, interleaved=interleaved)
    assert far(found, exact_rotation(x, cos, sin, interleaved=interleaved)) < TOLERANCE
    assert far(rotated(found, cos, -sin, interleaved=interleaved), x) < TOLERANCE


@pytest.mark.parametrize(
    ("norm", "groups", "queries", "width"), [(True, 2, 3, 96), (False, 2, 1, 64), (True, 8, 4, 128)]
)
def test_queries_keys_and_values(norm: bool, groups: int, queries: int, width: int) -> None:
    from vime.training.kernels.qkv import split_norm_rotate

    mixed = random(5, groups * (queries + 2) * width)
    inputs = [mixed, random(width), random(width)] if norm else [mixed]
    angles = torch.randn(5, 1, width // 2, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    weights = inputs[1:] or [None, None]
    found = split_norm_rotate(mixed, weights[0], weights[1], cos, sin, groups=groups, epsilon=1e-6)
    exact = doubles(inputs)
    by_group = exact[0].view(5, groups, queries + 2, width)
    parts = by_group[:, :, :queries].reshape(5, -1, width), by_group[:, :, queries]
    normed = [exact_norm(part, weight) for part, weight in zip(parts, exact[1:], strict=True)] if norm else parts
    turned = [exact_rotation(part, cos.double(), sin.double()) for part in normed]
    assert_same(found, inputs, [*turned, by_group[:, :, queries + 1]], exact)


def test_softmax_and_its_gradient() -> None:
    from vime.training.kernels.softmax import logits_to_gradient, row_statistics

    logits, scale = torch.randn(13, 10007, device=DEVICE) * 3, 0.7
    targets = torch.randint(0, 10007, (13,), device=DEVICE)
    targets[3] = -1  # of another rank's part of the vocabulary
    exact = logits.double().requires_grad_()
    scores = exact * scale
    peak = scores.detach().amax(-1)
    weights = torch.exp(scores - peak[:, None])
    chosen = torch.where(targets >= 0, scores.gather(1, targets.clamp(min=0)[:, None]).squeeze(1), 0.0)
    weighted = (weights * (scores - peak[:, None])).sum(-1)
    for found, expected in zip(
        row_statistics(logits, targets, scale), (peak, weights.sum(-1), weighted, chosen), strict=True
    ):
        assert far(found, expected) < TOLERANCE
    log_sums = scores.logsumexp(-1)
    log_probs = scores - log_sums[:, None]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    d_chosen, d_entropy = torch.randn(13, device=DEVICE), torch.randn(13, device=DEVICE)
    ((chosen - log_sums) * d_chosen + entropy * d_entropy).sum().backward()
    known = targets, log_sums.detach().float(), entropy.detach().float(), d_chosen, d_entropy, scale
    rounded = logits_to_gradient(logits, *known, out=torch.empty_like(logits, dtype=torch.bfloat16))
    assert exact.grad is not None
    assert far(rounded, exact.grad) < 4e-3
    assert far(logits_to_gradient(logits, *known, out=logits), exact.grad) < TOLERANCE


@pytest.mark.parametrize(
    ("queries", "keys"), [((5, 130, 64), (5, 130, 64)), ((40, 1), (200, 77))], ids=["own keys", "earlier keys too"]
)
def test_attention(queries: tuple[int, ...], keys: tuple[int, ...]) -> None:
    from vime.training.kernels.attention import attention_forward

    dtype, tolerance = (torch.bfloat16, 4e-3) if DEVICE == "cuda" else (torch.float32, TOLERANCE)
    query = torch.randn(sum(queries), 4, 64, device=DEVICE, dtype=dtype)
    key, value = (torch.randn(sum(keys), 2, 64, device=DEVICE, dtype=dtype) for _ in range(2))
    offsets = [torch.tensor([0, *x]).cumsum(0).to(DEVICE, torch.int32) for x in (queries, keys)]
    out, log_sums = attention_forward(query, key, value, (offsets[0], offsets[1]), (max(queries), max(keys)), 0.125)
    parts = zip(query.double().split(queries), key.double().split(keys), value.double().split(keys), strict=True)
    for (q, k, v), found, found_sums in zip(parts, out.split(queries), log_sums.split(queries, 1), strict=True):
        scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(2, 1)) * 0.125
        last = torch.arange(len(q), device=DEVICE)[:, None] + len(k) - len(q)
        scores = scores.masked_fill(torch.arange(len(k), device=DEVICE)[None] > last, float("-inf"))
        assert far(found, torch.einsum("hij,jhd->ihd", scores.softmax(-1), v.repeat_interleave(2, 1))) < tolerance
        assert far(found_sums, scores.logsumexp(-1)) < TOLERANCE
