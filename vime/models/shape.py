"""What a model looks like, in the words that Megatron uses for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of rotary frequencies; Megatron fixes all of its parameters but the factor."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes and switches of one decoder-only model, read from its config.json.

    Every supported family has RMSNorm before attention and MLP, rotary positions, grouped queries and SwiGLU.
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
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int
    tie_word_embeddings: bool = False  # the output layer is the embedding
    qk_layernorm: bool = False  # RMSNorm on each query and key head
    add_qkv_bias: bool = False
    dtype: str = "bfloat16"  # of the HF weights, as config.json says

    @property
    def heads_per_group(self) -> int:
        return self.num_attention_heads // self.num_query_groups

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
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }

    def gpt_fields(self) -> dict[str, Any]:
        """Keyword arguments for Megatron's GPTModel, without ``vocab_size``: that depends on the parallel layout."""
        fields: dict[str, Any] = {
            "max_sequence_length": self.max_position_embeddings,
            "position_embedding_type": "rope",
            "rotary_base": self.rotary_base,
            "share_embeddings_and_output_weights": self.tie_word_embeddings,
        }
        if self.rope_scaling is not None:
            fields |= {"rope_scaling": True, "rope_scaling_factor": self.rope_scaling.factor}
        return fields
