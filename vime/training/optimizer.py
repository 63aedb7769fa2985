"""AdamW in the shape of Apex's FusedAdam, and Megatron's optimizer and learning-rate scheduler around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from megatron.core.optimizer.optimizer_config import ParamKey
from torch import Tensor

__all__ = ["GroupAdam", "draft_groups", "is_draft"]

DRAFT_MARK = "is_decoupled_lr"
"""Parameter groups are the same in a checkpoint if they are in these marks of Megatron's. It reads this one nowhere."""


def draft_groups() -> dict[ParamKey, dict[str, bool]]:
    """What makes Megatron put the parameters of the draft layer into groups of their own."""
    return {ParamKey(name="*mtp.layers.*"): {DRAFT_MARK: True}}


def is_draft(group: Mapping[str, Any]) -> bool:
    """Whether a parameter group is one of the draft layer's."""
    return bool(group[DRAFT_MARK])


class GroupAdam(torch.optim.Optimizer):
    """AdamW that counts steps once a parameter group, by torch's fused kernel.

    Megatron has two code paths: for Apex's and Transformer Engine's FusedAdam, and for torch's AdamW. Only the first
    one saves and loads distributed checkpoints reliably: with AdamW's one ``step`` tensor a parameter, loading fails
    on a fresh optimizer. This class takes the first path without either package, on any device.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        if not adam_w_mode:
            raise ValueError("only AdamW, with decoupled weight decay, is implemented")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are computed by Megatron's schedules"
        for group in self.param_groups:
            # Also where this rank has none of the group's parameters: a checkpoint has the count of the first rank.
            group["step"] = int(group.get("step", 0)) + 1
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(group, parameters)

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if "exp_avg" not in self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
                self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        step = torch.tensor(float(group["step"])).to(parameters[0].device)
        torch._fused_adamw_(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            [self.state[parameter]["exp_avg"] for parameter in parameters],
            [self.state[parameter]["exp_avg_sq"] for parameter in parameters],
            [],
            [step] * len(parameters),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
