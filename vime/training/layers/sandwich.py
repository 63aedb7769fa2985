"""A decoder layer with a norm on both sides of attention and MLP, as GLM-4-0414 has it."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

__all__ = ["SandwichLayer"]


class SandwichLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's layer; what attention and MLP return is normed before it is added to the residual.

    The norms are applied by hooks on the two modules. Megatron's place for a change just before the sum, its
    ``bias_dropout_add``, would not do: that runs with gradients enabled also where none are wanted.
    """

    def __init__(self, config: TransformerConfig, *args: Any, post_norm: type[Any], **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.post_self_attn_layernorm = build_module(post_norm, **norm)
        self.post_mlp_layernorm = build_module(post_norm, **norm)
        _norm_output(self.self_attention, self.post_self_attn_layernorm)
        _norm_output(self.mlp, self.post_mlp_layernorm)


def _norm_output(module: nn.Module, norm: nn.Module) -> None:
    def hook(module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, None]:
        hidden, bias = output
        return norm(hidden if bias is None else hidden + bias), None

    module.register_forward_hook(hook)
