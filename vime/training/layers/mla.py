"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).

Queries, keys and values are projected down to narrow latents first. Of each head's channels some are rotated by
position (R) and the others are not; the rotated channels of the keys are one head that all share.

Megatron has this layer too. It is not used: without Transformer Engine its tensor parallelism cuts the latents, and
what a rank's heads say about the shared rotated keys never reaches the other ranks' gradients; and it computes its own
rotary positions in every layer.

Shapes in comments: T tokens, S tokens of this rank under sequence parallelism (else T), H heads of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from vime.models import MlaShape
from vime.training.layers.attention import attend
from vime.training.layers.rope import rotate
from vime.training.layers.segments import Segments

__all__ = ["LatentAttention", "LatentSubmodules"]

LATENT_NORM_EPSILON = 1e-6
"""Of the norms of latents, whatever the model's own epsilon: so it is in DeepSeek's code and in transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSubmodules:
    """The blocks that the layer is built of."""

    column_linear: type[Any]
    row_linear: type[Any]
    norm: type[Any]


class ReplicatedLinear(torch.nn.Linear):
    """A projection that every tensor-parallel rank has whole.

    Under sequence parallelism each rank sees a part of the tokens only; Megatron sums the gradients of the parameters
    that carry ``sequence_parallel``.
    """

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LatentAttention(MegatronModule):  # type: ignore[misc]
    """The whole attention of a layer, in the place of Megatron's ``SelfAttention``."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: LatentSubmodules,
        layer_number: int,
        *,
        mla: MlaShape,
        softmax_factor: float,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.mla = layer_number, mla
        self.scale = softmax_factor * mla.qk_head_dim**-0.5
        self.heads = config.num_attention_heads // pg_collection.tp.size()
        self.recomputes = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        linear: dict[str, Any] = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        column = linear | {"init_method": config.init_method, "gather_output": False, "skip_bias_add": False}
        hidden, heads = config.hidden_size, config.num_attention_heads
        wide_q, wide_kv = heads * mla.qk_head_dim, heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        if mla.q_lora_rank is None:
            self.linear_q_proj = build_module(submodules.column_linear, hidden, wide_q, **column)
        else:
            self.linear_q_down_proj = ReplicatedLinear(config, hidden, mla.q_lora_rank)
            self.q_layernorm = build_module(submodules.norm, config, mla.q_lora_rank, eps=LATENT_NORM_EPSILON)
            self.linear_q_up_proj = build_module(submodules.column_linear, mla.q_lora_rank, wide_q, **column)
        self.linear_kv_down_proj = ReplicatedLinear(config, hidden, mla.kv_lora_rank + mla.qk_rope_head_dim)
        self.kv_layernorm = build_module(submodules.norm, config, mla.kv_lora_rank, eps=LATENT_NORM_EPSILON)
        self.linear_kv_up_proj = build_module(submodules.column_linear, mla.kv_lora_rank, wide_kv, **column)
        self.linear_proj = build_module(
            submodules.row_linear,
            heads * mla.v_head_dim,
            hidden,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *, packed_seq_params: Segments, **_: Any
    ) -> tuple[Tensor, None]:
        """[S, 1, hidden size] → the same shape; the second item stands for the bias that there is not."""
        inputs = (*self._projected(hidden_states), packed_seq_params)
        if self.recomputes and self.training:
            out_t1 = tensor_parallel.checkpoint(self._attend, False, *inputs)
        else:
            out_t1 = self._attend(*inputs)
        output, _bias = self.linear_proj(out_t1)
        return output, None

    def _projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, 1, H·(D + R)], keys with values [T, 1, H·(D + E)], and the keys' rotated channels [T, 1, R]."""
        if self.mla.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))
        latent, key_rope = self.linear_kv_down_proj(hidden).split(
            (self.mla.kv_lora_rank, self.mla.qk_rope_head_dim), -1
        )
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        return query, key_value, _for_all_heads(key_rope, self.config.sequence_parallel)

    def _attend(self, query: Tensor, key_value: Tensor, key_rope: Tensor, segments: Segments) -> Tensor:
        """→ [T, 1, H·E]"""
        mla = self.mla
        assert segments.rope is not None, "rotary positions come with the micro-batch"
        query = query.view(-1, self.heads, mla.qk_head_dim)
        key_value = key_value.view(-1, self.heads, mla.qk_nope_head_dim + mla.v_head_dim)
        q_nope, q_rope = query.tensor_split((mla.qk_nope_head_dim,), -1)
        k_nope, value = key_value.tensor_split((mla.qk_nope_head_dim,), -1)
        k_rope = rotate(key_rope, segments.rope).expand(-1, self.heads, -1)
        query = torch.cat((q_nope, rotate(q_rope, segments.rope)), -1)
        key = torch.cat((k_nope, k_rope), -1)
        out = attend(query, key, value, segments, scale=self.scale, layer=self.layer_number)
        return out.flatten(1).unsqueeze(1)


def _for_all_heads(key_rope: Tensor, sequence_parallel: bool) -> Tensor:
    """[S, 1, R] → [T, 1, R], used by the heads of every rank: their gradients are summed on the way back."""
    if sequence_parallel:
        gathered: Tensor = tensor_parallel.gather_from_sequence_parallel_region(
            key_rope, tensor_parallel_output_grad=True
        )
        return gathered
    copied: Tensor = tensor_parallel.copy_to_tensor_model_parallel_region(key_rope)
    return copied
