"""What the mixture-of-experts families share: how config.json describes experts and how their weights map."""

from __future__ import annotations

from collections.abc import Iterator

from vime.models.hf_config import HfConfig
from vime.models.rules import DIRECT, GatedConcat, HfTensor, WeightRule
from vime.models.shape import ModelShape, MoeShape

EXPERTS_THAT_RANK_A_GROUP = 2
"""A group of experts is as good as the sum of its two best scores; Megatron sums the ``top_k // top_k_groups`` best."""


def read_sigmoid_moe(config: HfConfig, num_layers: int) -> MoeShape:
    """Experts as DeepSeek-V3 has them (https://arxiv.org/abs/2412.19437, section 2.1.2).

    The first layers are dense, one expert sees every token, scores are sigmoids, and a bias that is no part of the
    weights keeps the load even.

    Raises:
        UserError: a value is missing or impossible, or the groups are chosen in another way than Megatron does it.
    """
    config.refuse_unless("norm_topk_prob", [True], default=True)
    config.refuse_unless("moe_layer_freq", [1], default=1)
    config.refuse_unless("scoring_func", ["sigmoid"], default="sigmoid")
    config.refuse_unless("topk_method", ["noaux_tc"], default="noaux_tc")
    width = config.integer("moe_intermediate_size")
    top_k, groups = config.integer("num_experts_per_tok"), config.integer("n_group", 1)
    top_groups = config.integer("topk_group", 1)
    if groups > 1 and top_k // top_groups != EXPERTS_THAT_RANK_A_GROUP:
        config.refuse_unless("topk_group", [top_k // EXPERTS_THAT_RANK_A_GROUP], default=1)
    return MoeShape(
        num_experts=config.integer("n_routed_experts", config.values.get("num_local_experts")),
        top_k=top_k,
        ffn_hidden_size=width,
        dense_layers=frozenset(range(min(config.count("first_k_dense_replace"), num_layers))),
        shared_ffn_hidden_size=config.integer("n_shared_experts") * width,
        score_function="sigmoid",
        scaling_factor=config.number("routed_scaling_factor", 1.0),
        expert_bias=True,
        num_groups=groups,
        top_k_groups=top_groups,
    )


def moe_rules(shape: ModelShape, megatron: str, hf: str, layer: int | None) -> Iterator[WeightRule]:
    """Router, experts and shared experts of one layer, in HF's order.

    Args:
        megatron: what the Megatron names begin with, e.g. "decoder.layers.3.mlp".
        hf: what the HF names begin with, e.g. "model.layers.3.mlp".
        layer: the decoder layer; None for one behind the decoder.
    """
    moe = shape.moe
    assert moe is not None
    gate = HfTensor(f"{hf}.gate.weight", (moe.num_experts, shape.hidden_size))
    yield WeightRule(megatron=f"{megatron}.router.weight", hf=(gate,), layer=layer)
    if moe.expert_bias:
        bias = HfTensor(f"{hf}.gate.e_score_correction_bias", (moe.num_experts,), dtype="float32")
        yield WeightRule(megatron=f"{megatron}.router.expert_bias", hf=(bias,), layer=layer)
    for expert in range(moe.num_experts):
        names = f"{megatron}.experts.local_experts.{expert}", f"{hf}.experts.{expert}"
        yield from mlp_rules(*names, shape.hidden_size, moe.ffn_hidden_size, layer=layer, expert=expert)
    if moe.shared_ffn_hidden_size is not None:
        names = f"{megatron}.shared_experts", f"{hf}.shared_experts"
        yield from mlp_rules(*names, shape.hidden_size, moe.shared_ffn_hidden_size, layer=layer)


def mlp_rules(
    megatron: str,
    hf: str,
    hidden: int,
    wide: int,
    *,
    layer: int | None,
    expert: int | None = None,
    fused: bool = False,
) -> Iterator[WeightRule]:
    """One gated MLP of ``wide`` channels: gate and up, then down. ``fused``: HF has gate over up as one tensor."""
    halves = [HfTensor(f"{hf}.{x}_proj.weight", (wide, hidden)) for x in ("gate", "up")]
    whole = HfTensor(f"{hf}.gate_up_proj.weight", (2 * wide, hidden))
    yield WeightRule(
        megatron=f"{megatron}.linear_fc1.weight",
        hf=(whole,) if fused else tuple(halves),
        op=DIRECT if fused else GatedConcat(),
        tp_dim=0,
        tp_parts=2 if fused else 1,
        layer=layer,
        expert=expert,
    )
    down = HfTensor(f"{hf}.down_proj.weight", (hidden, wide))
    yield WeightRule(megatron=f"{megatron}.linear_fc2.weight", hf=(down,), tp_dim=1, layer=layer, expert=expert)
