"""The layer behind the decoder that predicts one token further (multi-token prediction), as engines draft with it.

DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 2.2, depth 1): from the decoder's output at token i, after its
last norm, and the embedding of token i + 1 it makes what the output layer turns into the distribution of token i + 2.

Embedding, decoder and output layer are the policy's. They are only read here: the loss of this layer propagates into
nothing but the layer itself.

Shape suffixes: l tokens of the pack on this rank (under sequence parallelism, x only its part of them), h hidden size.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from vime.training.layers.segments import Segments

__all__ = ["DraftBlock", "embedded"]


class DraftLayer(MegatronModule):  # type: ignore[misc]
    """Norms of both inputs, their projection, an ordinary layer, and a norm. Parameters have Megatron's names."""

    def __init__(self, config: TransformerConfig, layer: ModuleSpec, norm: type[Any], vp_stage: int | None) -> None:
        super().__init__(config)
        sizes = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.enorm, self.hnorm, self.final_layernorm = (build_module(norm, config=config, **sizes) for _ in range(3))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False, dtype=config.params_dtype)
        # each tensor-parallel rank has all of it; under sequence parallelism, for its own tokens
        self.eh_proj.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        number = config.num_layers + 1 - get_transformer_layer_offset(config, vp_stage)
        self.transformer_layer = build_module(layer, config=config, layer_number=number, vp_stage=vp_stage)

    def forward(self, hidden_x1h: Tensor, following_x1h: Tensor, segments: Segments) -> Tensor:
        """The decoder's output and the embedding of the tokens that follow → what goes into the output layer."""
        both = torch.cat((self.enorm(following_x1h), self.hnorm(hidden_x1h)), dim=-1)
        output, _ = self.transformer_layer(self.eh_proj(both), attention_mask=None, packed_seq_params=segments)
        normed: Tensor = self.final_layernorm(output)
        return normed


class DraftBlock(MegatronModule):  # type: ignore[misc]
    """The layers behind the decoder, of which there is one. They are on the last pipeline stage."""

    def __init__(self, config: TransformerConfig, layer: ModuleSpec, norm: type[Any], vp_stage: int | None) -> None:
        """Balancing losses of routers are for the policy's layers."""
        config = copy.copy(config)
        config.moe_aux_loss_coeff, config.moe_z_loss_coeff = 0.0, None
        super().__init__(config)
        self.layers: Any = nn.ModuleList([DraftLayer(config, layer, norm, vp_stage)])

    def forward(self, hidden_x1h: Tensor, following_x1h: Tensor, segments: Segments) -> Tensor:
        """See ``DraftLayer``. Routes are followed where they were given for this layer too; the log-prob pass, which
        does without the layer, records none."""
        (layer,) = self.layers
        routes, number = segments.routes, layer.transformer_layer.layer_number
        if routes is not None and not routes.knows(number):
            routes = None
        output: Tensor = layer(hidden_x1h, following_x1h, dataclasses.replace(segments, routes=routes, kept=None))
        return output

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For checkpoints; Megatron would take a list of layers for something that no rank shares."""
        (layer,) = self.layers
        found: dict[str, Any] = layer.sharded_state_dict(f"{prefix}layers.0.", sharded_offsets, metadata)
        return found


@torch.no_grad()
def embedded(tokens_l: Tensor, rows_vh: Tensor, *, sequence_parallel: bool) -> Tensor:
    """The embedding of the tokens, [x, 1, H], from this rank's rows of it."""
    first = parallel_state.get_tensor_model_parallel_rank() * len(rows_vh)
    local = tokens_l - first
    mine = (local >= 0) & (local < len(rows_vh))
    part = F.embedding(local.clamp(0, len(rows_vh) - 1), rows_vh).masked_fill_(~mine[:, None], 0)
    whole: Tensor = reduce_from_tensor_model_parallel_region(part[:, None])
    return scatter_to_sequence_parallel_region(whole) if sequence_parallel else whole
