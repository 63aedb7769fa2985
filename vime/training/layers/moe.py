"""Mixture-of-experts layers: Megatron's own, whose routers can be told which experts to choose.

A token is sent to the ``top_k`` experts that its router scores highest. Experts are spread over expert-parallel ranks,
so tokens travel there and back (all-to-all); each expert may be cut by expert tensor parallelism.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from vime.platform.megatron_moe import define_missing_gemm
from vime.training.layers.dispatch import dispatcher
from vime.training.layers.segments import Segments
from vime.training.replay import Routes

__all__ = ["Moe", "MoeTransformerLayer", "Router", "moe_spec"]


class Router(TopKRouter):  # type: ignore[misc]
    """Megatron's router; it records its choices or repeats recorded ones when the micro-batch asks for it.

    Its auxiliary losses and its bias balance the tokens of samples: those that fill up a pack, other ones in every
    layout, are left out.
    """

    filling: Tensor | None = None  # bool [T], of the micro-batch that passes

    def follow(self, routes: Routes | None, filling: Tensor | None) -> None:
        """What the next pass records or repeats; None: it chooses by itself and tells nobody."""
        self.router_replay = None if routes is None else routes.at(self.layer_number)
        self.filling = filling

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Megatron calls tokens that nobody looks at padding."""
        filling = self.filling
        if filling is not None and self.config.sequence_parallel:
            group = parallel_state.get_tensor_model_parallel_group()
            filling = filling.chunk(group.size())[group.rank()]
        probs, chosen = super().routing(logits, padding_mask=filling)
        return probs, chosen

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Megatron combines [T, experts] with [T] (router.py:543), which has to be [T, 1]."""
        super()._apply_expert_bias(routing_map, None if padding_mask is None else padding_mask[:, None])

    def keep_float32(self) -> None:
        """Undoes what converting the whole model to 16 bits did to the expert bias, and to the counts behind it.

        Megatron restores the bias too, but only in the first forward pass, which is after the weights are loaded.
        """
        if self.expert_bias is not None:
            for buffer in (self.expert_bias, self.local_tokens_per_expert):
                buffer.data = buffer.data.float()


class Moe(MoELayer):  # type: ignore[misc]
    """Megatron's layer. Where it is recomputed in the backward pass, its router follows the same routes again.

    By then other micro-batches may have passed: what is recomputed has to carry the routes of its own.
    """

    parts: ClassVar[MoESubmodules]
    routes: Routes | None = None  # of the micro-batch that passes, and so is what fills it
    filling: Tensor | None = None
    moe_layer_recompute: bool
    token_dispatcher: MoETokenDispatcher

    def __init__(self, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(config, submodules=self.parts, **kwargs)
        self._recomputed, self.moe_layer_recompute = self.moe_layer_recompute, False
        if getattr(self.experts, "grouped", False):
            self.token_dispatcher = dispatcher(
                config,
                self.token_dispatcher,
                num_local_experts=self.num_local_experts,
                local_expert_indices=self.local_expert_indices,
                pg_collection=get_default_pg_collection(),
            )

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        """[L, 1, H] → the same shape, and None: there is no bias."""
        follow = functools.partial(self._follow, self.routes, self.filling)
        return tensor_parallel.checkpoint(follow, False, hidden_states) if self._recomputed else follow(hidden_states)

    def _follow(self, routes: Routes | None, filling: Tensor | None, hidden_states: Tensor) -> Any:
        self.router.follow(routes, filling)
        return super().forward(hidden_states)


class MoeTransformerLayer(TransformerLayer):  # type: ignore[misc]
    """A layer that tells its experts which micro-batch passes; Megatron tells only the attention."""

    def forward(self, *args: Any, packed_seq_params: Segments | None = None, **kwargs: Any) -> Any:
        self.mlp.routes = None if packed_seq_params is None else packed_seq_params.routes
        self.mlp.filling = None if packed_seq_params is None else packed_seq_params.filling
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


def moe_spec(mlp: MLPSubmodules, experts: type[SequentialMLP]) -> type[Moe]:
    """The layer with router, experts and, where the configuration has them, shared experts; each is built of ``mlp``.

    It is a class, not a ModuleSpec, because Megatron warns of specs for modules that it does not know.
    """
    define_missing_gemm()
    parts = MoESubmodules(
        router=Router,
        experts=ModuleSpec(module=experts, submodules=mlp),
        shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=mlp),
    )
    return type("Moe", (Moe,), {"parts": parts})
