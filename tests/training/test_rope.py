"""Rotary positions: the frequencies of transformers, and rotations that turn what they should."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vime.models import RopeScaling, YarnScaling
from vime.training.layers.rope import Rope, rotate

TOKENS, HEADS, WIDTH = 12, 3, 32
LLAMA3 = {"factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 5.0, "original_max_position_embeddings": 1024}
YARN = {"factor": 40.0, "original_max_position_embeddings": 4096}

SCALINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama3", LLAMA3),
    "yarn": ("yarn", YARN),
    "yarn of DeepSeek": ("yarn", YARN | {"mscale": 0.707, "mscale_all_dim": 1.0}),
    "yarn with other bounds": ("yarn", YARN | {"beta_fast": 16.0, "beta_slow": 2.0}),
    "yarn, not truncated": ("yarn", YARN | {"truncate": False}),
    "yarn with a factor of attention": ("yarn", YARN | {"attention_factor": 1.5}),
    "yarn without a ramp": ("yarn", YARN | {"beta_fast": 4.0, "beta_slow": 4.0, "truncate": False}),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, fields = SCALINGS[name]
    parameters = {"rope_type": kind, "rope_theta": 50000.0, "partial_rotary_factor": 0.5} | fields
    config = LlamaConfig(head_dim=2 * WIDTH, max_position_embeddings=163840, rope_parameters=parameters)
    expected, attention_factor = ROPE_INIT_FUNCTIONS[kind](config)
    if kind == "yarn":
        scaling: Any = YarnScaling(
            **{{"attention_factor": "given_attention_factor"}.get(key, key): value for key, value in fields.items()}
        )
        assert scaling.attention_factor == pytest.approx(attention_factor)
    else:
        scaling = RopeScaling(**fields)
    rope = Rope(width=WIDTH, base=50000.0, scaling=scaling)
    torch.testing.assert_close(rope.frequencies(), expected, rtol=1e-6, atol=0)
    table = rope.table(torch.zeros(1, dtype=torch.int64), torch.float32)
    torch.testing.assert_close(table.cos, torch.full((1, 1, WIDTH // 2), attention_factor))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [WIDTH, WIDTH // 2])
def test_rotation_is_that_of_transformers(interleaved: bool, width: int) -> None:
    from transformers.models.glm4 import modeling_glm4
    from transformers.models.glm4_moe import modeling_glm4_moe

    rope = Rope(width=width, base=10000.0, interleaved=interleaved)
    positions = torch.arange(TOKENS)
    x = torch.randn(TOKENS, HEADS, WIDTH)
    angles = (positions[:, None] * rope.frequencies()).repeat(1, 2)[None]
    theirs = modeling_glm4 if interleaved else modeling_glm4_moe
    expected, _ = theirs.apply_rotary_pos_emb(x[None], x[None], angles.cos(), angles.sin(), unsqueeze_dim=2)
    torch.testing.assert_close(rotate(x, rope.table(positions, torch.float32)), expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [WIDTH, WIDTH // 2])
def test_rotation_is_undone_by_its_gradient(interleaved: bool, width: int) -> None:
    """The rotation is orthogonal, so its backward pass turns the output back into the input."""
    table = Rope(width=width, base=10000.0, interleaved=interleaved).table(torch.arange(TOKENS), torch.float64)
    x = torch.randn(TOKENS, HEADS, WIDTH, dtype=torch.float64, requires_grad=True)
    out = rotate(x, table)
    assert not torch.allclose(out[1:], x[1:])
    assert torch.equal(out[..., width:], x[..., width:])
    torch.testing.assert_close(torch.autograd.grad(out, x, out.detach())[0], x, rtol=1e-6, atol=1e-6)


def test_a_scaled_rotation_has_the_right_gradient() -> None:
    scaling = YarnScaling(factor=4.0, original_max_position_embeddings=64)
    table = Rope(width=8, base=10000.0, scaling=scaling).table(torch.arange(3), torch.float64)
    x = torch.randn(3, 2, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, table), x)
