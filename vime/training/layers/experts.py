"""Experts of which each is a module of its own, computed together where kernels do that.

Parameters, checkpoints and the weights that engines get are those of Megatron's ``SequentialMLP``. Its loop would
launch several small products for each of up to hundreds of experts, and wait for the device to tell it their sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.nn import Parameter

from vime.platform import current
from vime.training.layers.lean import lean

if TYPE_CHECKING:
    from vime.training.kernels.grouped import Groups, Table

__all__ = ["GroupedExperts"]


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """Megatron's experts, with one launch of a kernel for each product of all experts."""

    def __init__(self, num_local_experts: int, config: Any, submodules: Any, **kwargs: Any) -> None:
        super().__init__(num_local_experts, config, submodules, **kwargs)
        self.grouped = current().fused_kernels and _fits(self.config)
        if self.grouped:
            from vime.training.kernels.grouped import Addresses

            self._weights, self._gradients = (Addresses(), Addresses()), (Addresses(), Addresses())

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """[R, H] sorted by expert, int64 [E], [R] → [R, H]; E are the experts of this rank."""
        if not self.grouped:
            answer: tuple[Tensor, None] = super().forward(rows, tokens_per_expert, probs)
            return answer
        counts = tokens_per_expert.to(rows.device, non_blocking=True)
        with lean(rows):
            output: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
                self, rows, probs, counts, *self._parameters_in_order()
            )
        return output, None

    def _parameters_in_order(self) -> Iterator[Parameter]:
        """The first weight of each expert, then the second of each.

        Megatron waits in a hook of a linear layer for a weight that is still being gathered from other ranks.
        """
        for linear in ("linear_fc1", "linear_fc2"):
            for expert in self.local_experts:
                module = getattr(expert, linear)
                for hook in module._forward_pre_hooks.values():
                    hook(module, ())
                yield module.weight

    def tables(self, weights: Sequence[Tensor]) -> tuple[Table, Table]:
        """Where the first and the second weights are."""
        half = len(weights) // 2
        return self._weights[0].of(weights[:half]), self._weights[1].of(weights[half:])

    def weight_gradients(
        self, layer: int, weights: Sequence[Any], dy: Tensor, x: Tensor, groups: Groups
    ) -> list[Tensor | None]:
        """What autograd gets for each weight. Where gradients are added to Megatron's buffers that is a tensor of any
        value, for its hooks to be called: see ``vime.platform.megatron_wgrad``.
        """
        from vime.training.kernels.grouped import Table, gradient_tile, grouped_weight_gradients

        trained = [weight for weight in weights if weight.requires_grad]
        if not trained:
            return [None] * len(weights)
        adds = self.config.gradient_accumulation_fusion
        made = x.new_empty(1 if adds else len(weights), *weights[0].shape)  # one for all where nobody reads it
        if adds:
            targets = [weight.main_grad if weight.requires_grad else None for weight in weights]
            table, dtype = self._gradients[layer].of(targets), trained[0].main_grad.dtype
        else:
            table, dtype = Table.of_slices(made), x.dtype
        grouped_weight_gradients(dy, x, table, groups, dtype=dtype, add=adds, tile=gradient_tile(x.dtype))
        for weight in trained if adds else ():
            weight.grad_added_to_main_grad = True
        values = made.expand(len(weights), *weights[0].shape).unbind()
        return [value if weight.requires_grad else None for weight, value in zip(weights, values, strict=True)]


class _Experts(torch.autograd.Function):
    """``(silu(gate) * up * prob) @ down^T`` of each row; each parameter is an input, so that hooks on it are called."""

    @staticmethod
    def forward(
        ctx: Any, experts: GroupedExperts, rows: Tensor, probs: Tensor, counts: Tensor, *weights: Tensor
    ) -> Tensor:
        from vime.training.kernels.grouped import Groups, grouped_product, product_tile
        from vime.training.kernels.swiglu import weighted_swiglu

        rows = rows.contiguous()
        tile = product_tile(rows.dtype)
        groups = Groups.of(counts, len(rows), tile)
        ups, downs = experts.tables(weights)
        wide = grouped_product(rows, ups, weights[0].shape[0], groups, tile)
        output = grouped_product(weighted_swiglu(wide, probs), downs, rows.shape[1], groups, tile)
        ctx.save_for_backward(rows, probs, wide)
        ctx.experts, ctx.groups, ctx.parameters = experts, groups, weights
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from vime.training.kernels.grouped import grouped_product_transposed, product_tile
        from vime.training.kernels.swiglu import weighted_swiglu_gradients

        rows, probs, wide = ctx.saved_tensors
        groups: Groups = ctx.groups
        tile = product_tile(rows.dtype)
        gradient = gradients[0].contiguous()
        ups, downs = ctx.experts.tables(ctx.parameters)
        d_narrow = grouped_product_transposed(gradient, downs, wide.shape[1] // 2, groups, tile)
        d_wide, d_probs, narrow = weighted_swiglu_gradients(d_narrow, wide, probs, groups.ends[-1])
        del d_narrow
        half = len(ctx.parameters) // 2
        d_ups = ctx.experts.weight_gradients(0, ctx.parameters[:half], d_wide, rows, groups)
        d_downs = ctx.experts.weight_gradients(1, ctx.parameters[half:], gradient, narrow, groups)
        d_rows = None
        if ctx.needs_input_grad[1]:
            d_rows = grouped_product_transposed(d_wide, ups, rows.shape[1], groups, tile)
        return None, d_rows, d_probs.to(probs.dtype), None, *d_ups, *d_downs


def _fits(config: Any) -> bool:
    """Whether experts are SwiGLU without biases, in a precision that torch has."""
    plain = config.gated_linear_unit and config.activation_func is torch.nn.functional.silu
    altered = (
        config.add_bias_linear
        or config.moe_apply_probs_on_input
        or config.activation_func_clamp_value is not None
        or config.glu_linear_offset
        or config.fp8
        or config.fp4
    )
    return bool(plain and not altered)
