"""What a model looks like, in the words that Megatron uses for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of rotary frequencies."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN's stretching of rotary frequencies (https://arxiv.org/abs/2309.00071), as DeepSeek uses it."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    given_attention_factor: float | None = None
    truncate: bool = True  # the ramp between fast and slow waves begins and ends at whole channels

    @property
    def attention_factor(self) -> float:
        """What cosine and sine are multiplied by, so that attention stays as sharp over a longer context."""
        if self.given_attention_factor is not None:
            return self.given_attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharpness(self.mscale) / self._sharpness(self.mscale_all_dim)
        return self._sharpness(1.0)

    @property
    def softmax_factor(self) -> float:
        """What latent attention multiplies its scores by: there also channels without rotation are to be sharpened."""
        return self._sharpness(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _sharpness(self, weight: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """The mixture-of-experts layers of a model: a router that sends each token to ``top_k`` of ``num_experts``."""

    num_experts: int
    top_k: int
    ffn_hidden_size: int  # of one expert
    dense_layers: frozenset[int]  # layers (from 0) that have an ordinary MLP instead
    shared_ffn_hidden_size: int | None = None  # of the expert that sees every token; None: there is none
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    normalize_weights: bool = True  # the weights of the chosen experts sum to 1 (before ``scaling_factor``)
    scaling_factor: float = 1.0
    expert_bias: bool = False  # added to the scores when experts are chosen, not when they are weighed
    num_groups: int = 1  # experts are chosen from the best ``top_k_groups`` of these groups
    top_k_groups: int = 1

    def transformer_fields(self, num_layers: int) -> dict[str, Any]:
        """Keyword arguments for Megatron's TransformerConfig.

        With softmax Megatron has no switch for normalising: the weights of the chosen experts sum to 1 when softmax
        comes after the choice, which is the same, and do not when it comes before. With sigmoid they always do.
        """
        grouped = self.num_groups > 1
        return {
            "num_moe_experts": self.num_experts,
            "moe_router_topk": self.top_k,
            "moe_ffn_hidden_size": self.ffn_hidden_size,
            "moe_layer_freq": [int(layer not in self.dense_layers) for layer in range(num_layers)],
            "moe_shared_expert_intermediate_size": self.shared_ffn_hidden_size,
            "moe_router_score_function": self.score_function,
            "moe_router_pre_softmax": self.score_function == "softmax" and not self.normalize_weights,
            "moe_router_topk_scaling_factor": None if self.scaling_factor == 1 else self.scaling_factor,
            "moe_router_enable_expert_bias": self.expert_bias,
            "moe_router_num_groups": self.num_groups if grouped else None,
            "moe_router_group_topk": self.top_k_groups if grouped else None,
            "moe_router_dtype": "fp32",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaShape:
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434)."""

    q_lora_rank: int | None  # None: queries are projected from the hidden state directly
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes and switches of one decoder-only model, read from its config.json.

    Every supported family has RMSNorm before attention and MLP, rotary positions and SwiGLU.
    """

    architecture: str  # as config.json names it, e.g. "Qwen3ForCausalLM"
    vocab_size: int  # rows that the tokenizer or the HF model knows, without padding
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int  # key/value heads
    kv_channels: int  # width of one head
    norm_epsilon: float
    rotary_base: float
    rope_scaling: RopeScaling | YarnScaling | None = None
    rotary_percent: float = 1.0  # of the channels of a head that are rotated, from the first on
    rotary_interleaved: bool = False  # channel 2i is rotated with 2i + 1, not i with i + half
    max_position_embeddings: int
    tie_word_embeddings: bool = False  # the output layer is the embedding
    qk_layernorm: bool = False  # RMSNorm on each query and key head or, in latent attention, on the latents
    add_qkv_bias: bool = False
    post_norms: bool = False  # RMSNorm also behind attention and MLP, before the residual is added
    moe: MoeShape | None = None
    mla: MlaShape | None = None
    num_mtp_layers: int = 0  # layers that predict further tokens (multi-token prediction), behind the decoder
    trained_mtp_layers: int = 0  # those of them that are part of the model here; the others are carried along
    longest_exact_context: int | None = None  # beyond it sparse attention would differ from dense; None: never
    dtype: str = "bfloat16"  # of the HF weights, as config.json says

    @property
    def heads_per_group(self) -> int:
        return self.num_attention_heads // self.num_query_groups

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0 over all pipeline stages, has a mixture of experts instead of an MLP."""
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def rotary_width(self) -> int:
        """Channels of a head that are rotated."""
        return self.mla.qk_rope_head_dim if self.mla else int(self.kv_channels * self.rotary_percent)

    @property
    def softmax_factor(self) -> float:
        """What attention scores are multiplied by besides (width of a head)^-½."""
        return self.rope_scaling.softmax_factor if self.mla and isinstance(self.rope_scaling, YarnScaling) else 1.0

    @property
    def rotary_by_megatron(self) -> bool:
        """Whether Megatron's own rotary positions are those of the model: it fixes Llama 3's bounds."""
        scaling = self.rope_scaling
        return self.mla is None and (scaling is None or scaling == RopeScaling(factor=scaling.factor))

    def padded_vocab_size(self, tensor_parallel_size: int = 1, divisible_by: int = 1) -> int:
        """Rows of Megatron's embedding: vocab_size rounded up so that each rank has a multiple of ``divisible_by``.

        The rows beyond ``vocab_size`` hold zeros and mean nothing: whoever normalises logits must leave them out.
        """
        multiple = tensor_parallel_size * divisible_by
        return -(-self.vocab_size // multiple) * multiple

    def transformer_fields(self) -> dict[str, Any]:
        """Keyword arguments for Megatron's TransformerConfig; parallel sizes and dtypes are set elsewhere."""
        import torch.nn.functional as F

        return {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "ffn_hidden_size": self.ffn_hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "num_query_groups": self.num_query_groups,
            "kv_channels": self.kv_channels,
            "normalization": "RMSNorm",
            "layernorm_epsilon": self.norm_epsilon,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            "add_qkv_bias": self.add_qkv_bias,
            "qk_layernorm": self.qk_layernorm,
            "rotary_interleaved": self.rotary_interleaved,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        } | ({} if self.moe is None else self.moe.transformer_fields(self.num_layers))

    def gpt_fields(self) -> dict[str, Any]:
        """Keyword arguments for Megatron's GPTModel, without ``vocab_size``: that depends on the parallel layout.

        What they say of rotary positions counts only where Megatron computes these itself: under Transformer Engine.
        """
        fields: dict[str, Any] = {
            "max_sequence_length": self.max_position_embeddings,
            "position_embedding_type": "rope",
            "rotary_base": self.rotary_base,
            "rotary_percent": self.rotary_percent,
            "share_embeddings_and_output_weights": self.tie_word_embeddings,
        }
        if isinstance(self.rope_scaling, RopeScaling):
            fields |= {"rope_scaling": True, "rope_scaling_factor": self.rope_scaling.factor}
        return fields
