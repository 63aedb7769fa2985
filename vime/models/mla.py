"""Multi-head latent attention: how config.json describes it and how its weights map."""

from __future__ import annotations

from collections.abc import Iterator

from vime.models.hf_config import HfConfig
from vime.models.rules import HfTensor, WeightRule
from vime.models.shape import MlaShape, ModelShape


def read_mla(config: HfConfig) -> MlaShape:
    """The widths of latents and heads.

    Raises:
        UserError: a width is missing or no positive integer.
    """
    return MlaShape(
        q_lora_rank=config.integer("q_lora_rank") if config.values.get("q_lora_rank") is not None else None,
        kv_lora_rank=config.integer("kv_lora_rank"),
        qk_nope_head_dim=config.integer("qk_nope_head_dim"),
        qk_rope_head_dim=config.integer("qk_rope_head_dim"),
        v_head_dim=config.integer("v_head_dim"),
    )


def latent_rules(shape: ModelShape, megatron: str, hf: str, layer: int | None) -> Iterator[WeightRule]:
    """The attention of one layer; tensor parallelism cuts heads and leaves the latents whole.

    Args:
        megatron: what the Megatron names begin with, e.g. "decoder.layers.3.self_attention".
        hf: what the HF names begin with, e.g. "model.layers.3.self_attn".
        layer: the decoder layer; None for one behind the decoder.
    """
    mla, heads, hidden = shape.mla, shape.num_attention_heads, shape.hidden_size
    assert mla is not None
    wide_q, wide_kv = heads * mla.qk_head_dim, heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    rank, latent = mla.q_lora_rank, mla.kv_lora_rank
    names: list[tuple[str, str, tuple[int, ...], int | None]] = []
    if rank is None:
        names += [("linear_q_proj", "q_proj", (wide_q, hidden), 0)]
    else:
        names += [
            ("linear_q_down_proj", "q_a_proj", (rank, hidden), None),
            ("q_layernorm", "q_a_layernorm", (rank,), None),
            ("linear_q_up_proj", "q_b_proj", (wide_q, rank), 0),
        ]
    names += [
        ("linear_kv_down_proj", "kv_a_proj_with_mqa", (latent + mla.qk_rope_head_dim, hidden), None),
        ("kv_layernorm", "kv_a_layernorm", (latent,), None),
        ("linear_kv_up_proj", "kv_b_proj", (wide_kv, latent), 0),
        ("linear_proj", "o_proj", (hidden, heads * mla.v_head_dim), 1),
    ]
    for ours, theirs, sizes, tp_dim in names:
        tensor = HfTensor(f"{hf}.{theirs}.weight", sizes)
        yield WeightRule(megatron=f"{megatron}.{ours}.weight", hf=(tensor,), tp_dim=tp_dim, layer=layer)
