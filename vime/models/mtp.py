"""Multi-token prediction: how the weights of the layers behind the decoder map, as DeepSeek-V3 has them.

HF numbers these layers on from the decoder's. Each has an ordinary layer between a projection and a last norm; the
embedding and the output layer are the model's own, of which some folders have copies under the layer's name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator

from vime.models.rules import HfTensor, WeightRule
from vime.models.shape import ModelShape

__all__ = ["copy_rules", "mtp_rules"]


def mtp_rules(shape: ModelShape, depth: int, layer: Iterable[WeightRule]) -> Iterator[WeightRule]:
    """The parameters of one of them, around those of its ordinary ``layer``. Megatron's names are its own ones."""
    megatron, hf = f"mtp.layers.{depth}", f"model.layers.{shape.num_layers + depth}"
    hidden = shape.hidden_size
    for name in ("enorm", "hnorm"):
        yield WeightRule(megatron=f"{megatron}.{name}.weight", hf=(HfTensor(f"{hf}.{name}.weight", (hidden,)),))
    projection = HfTensor(f"{hf}.eh_proj.weight", (hidden, 2 * hidden))
    yield WeightRule(megatron=f"{megatron}.eh_proj.weight", hf=(projection,))
    yield from layer
    norm = HfTensor(f"{hf}.shared_head.norm.weight", (hidden,))
    yield WeightRule(megatron=f"{megatron}.final_layernorm.weight", hf=(norm,))


def copy_rules(shape: ModelShape, rules: Iterable[WeightRule], names: Collection[str]) -> list[WeightRule]:
    """Rules for the copies of embedding and output layer that a folder with these ``names`` has in trained layers.

    They are for exports only: a copy is written from the parameter that it is a copy of, and never read.
    """
    by_hf = {tensor.name: rule for rule in rules for tensor in rule.hf}
    embedding = by_hf["model.embed_tokens.weight"]
    output = by_hf.get("lm_head.weight", embedding)
    found = []
    for depth in range(shape.trained_mtp_layers):
        layer = f"model.layers.{shape.num_layers + depth}"
        for name, rule in ((f"{layer}.embed_tokens.weight", embedding), (f"{layer}.shared_head.head.weight", output)):
            if name in names:
                found.append(dataclasses.replace(rule, hf=(HfTensor(name, rule.hf[0].shape),)))
    return found
