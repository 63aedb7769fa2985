"""What the Llama-like families share: a pre-norm decoder with RMSNorm, rotary positions, grouped queries and SwiGLU."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from vime.errors import UserError
from vime.models.hf_config import HfConfig
from vime.models.mla import latent_rules
from vime.models.moe import mlp_rules, moe_rules
from vime.models.mtp import mtp_rules
from vime.models.rules import HfTensor, QkvInterleave, WeightRule
from vime.models.shape import ModelShape


def read_decoder(
    config: HfConfig,
    *,
    head_dim: int | None = None,
    norm_epsilon: float = 1e-6,
    rotary_percent: float = 1.0,
    rotary_interleaved: bool = False,
    qk_layernorm: bool = False,
    add_qkv_bias: bool = False,
    post_norms: bool = False,
) -> ModelShape:
    """The shape that config.json describes.

    ``head_dim``, ``norm_epsilon`` and ``rotary_percent`` are what a family means when its config.json does not say it.

    Raises:
        UserError: a value is missing, impossible, or stands for something which is not implemented.
    """
    config.refuse_unless("hidden_act", ["silu"], default="silu")
    heads, hidden_size = config.integer("num_attention_heads"), config.integer("hidden_size")
    groups = config.integer("num_key_value_heads", heads)
    if heads % groups:
        raise UserError(f"{config.path}: {heads} attention heads cannot share {groups} key/value heads evenly")
    rotary_base, rope_scaling = config.rotary()
    return ModelShape(
        architecture=config.architecture,
        vocab_size=config.integer("vocab_size"),
        num_layers=config.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_hidden_size=config.integer("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=config.integer("head_dim", head_dim or hidden_size // heads),
        norm_epsilon=config.number("rms_norm_eps", norm_epsilon),
        rotary_base=rotary_base,
        rope_scaling=rope_scaling,
        rotary_percent=config.rotary_percent(rotary_percent),
        rotary_interleaved=rotary_interleaved,
        max_position_embeddings=config.integer("max_position_embeddings"),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        qk_layernorm=qk_layernorm,
        add_qkv_bias=add_qkv_bias,
        post_norms=post_norms,
        dtype=config.dtype(),
    )


def decoder_rules(shape: ModelShape, *, fused_gate_up: bool = False) -> Iterator[WeightRule]:
    """All parameters, in the order in which HF numbers them: embedding, layers, last norm, output layer, MTP layers.

    ``fused_gate_up``: the family stores the gate and up projections of an MLP as one tensor, gate over up.
    """
    vocabulary = (shape.vocab_size, shape.hidden_size)
    yield WeightRule(
        megatron="embedding.word_embeddings.weight",
        hf=(HfTensor("model.embed_tokens.weight", vocabulary),),
        tp_dim=0,
        vocabulary=True,
        copies=("output_layer.weight",) if shape.tie_word_embeddings else (),  # the last stage's, with PP > 1
    )
    for layer in range(shape.num_layers):
        yield from layer_rules(shape, f"decoder.layers.{layer}", layer, fused_gate_up=fused_gate_up)
    yield WeightRule(
        megatron="decoder.final_layernorm.weight", hf=(HfTensor("model.norm.weight", (shape.hidden_size,)),)
    )
    if not shape.tie_word_embeddings:
        yield WeightRule(
            megatron="output_layer.weight", hf=(HfTensor("lm_head.weight", vocabulary),), tp_dim=0, vocabulary=True
        )

    for depth in range(shape.trained_mtp_layers):
        names = f"mtp.layers.{depth}.transformer_layer", shape.num_layers + depth
        yield from mtp_rules(shape, depth, layer_rules(shape, *names, fused_gate_up=fused_gate_up))


def layer_rules(shape: ModelShape, megatron: str, number: int, *, fused_gate_up: bool) -> Iterator[WeightRule]:
    """One layer, which HF calls by its number; ``megatron`` is what the Megatron names begin with."""
    hf = f"model.layers.{number}"
    layer = number if number < shape.num_layers else None
    norm = functools.partial(_norm_rule, shape, megatron, hf, layer)
    yield norm("input_layernorm", "input_layernorm")
    attention_rules = latent_rules if shape.mla else _grouped_query_rules
    yield from attention_rules(shape, f"{megatron}.self_attention", f"{hf}.self_attn", layer)
    if shape.post_norms:
        yield norm("post_self_attn_layernorm", "post_self_attn_layernorm")
    yield norm("pre_mlp_layernorm", "post_attention_layernorm")
    if shape.has_experts(number):
        yield from moe_rules(shape, f"{megatron}.mlp", f"{hf}.mlp", layer)
    else:
        sizes = shape.hidden_size, shape.ffn_hidden_size
        yield from mlp_rules(f"{megatron}.mlp", f"{hf}.mlp", *sizes, layer=layer, fused=fused_gate_up)
    if shape.post_norms:
        yield norm("post_mlp_layernorm", "post_mlp_layernorm")


def _grouped_query_rules(shape: ModelShape, megatron: str, hf: str, layer: int | None) -> Iterator[WeightRule]:
    queries = shape.num_attention_heads * shape.kv_channels
    keys = shape.num_query_groups * shape.kv_channels
    rows = {"q": queries, "k": keys, "v": keys}
    interleave = QkvInterleave(shape.heads_per_group, shape.kv_channels)
    yield WeightRule(
        megatron=f"{megatron}.linear_qkv.weight",
        hf=tuple(HfTensor(f"{hf}.{x}_proj.weight", (n, shape.hidden_size)) for x, n in rows.items()),
        op=interleave,
        tp_dim=0,
        layer=layer,
    )
    if shape.add_qkv_bias:
        yield WeightRule(
            megatron=f"{megatron}.linear_qkv.bias",
            hf=tuple(HfTensor(f"{hf}.{x}_proj.bias", (n,)) for x, n in rows.items()),
            op=interleave,
            tp_dim=0,
            layer=layer,
        )
    if shape.qk_layernorm:
        for x in "qk":
            norm = HfTensor(f"{hf}.{x}_norm.weight", (shape.kv_channels,))
            yield WeightRule(megatron=f"{megatron}.{x}_layernorm.weight", hf=(norm,), layer=layer)
    out = HfTensor(f"{hf}.o_proj.weight", (shape.hidden_size, queries))
    yield WeightRule(megatron=f"{megatron}.linear_proj.weight", hf=(out,), tp_dim=1, layer=layer)


def _norm_rule(shape: ModelShape, megatron: str, hf: str, layer: int | None, ours: str, theirs: str) -> WeightRule:
    norm = HfTensor(f"{hf}.{theirs}.weight", (shape.hidden_size,))
    return WeightRule(megatron=f"{megatron}.{ours}.weight", hf=(norm,), layer=layer)
