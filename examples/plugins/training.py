"""Hooks on the ranks of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def exact_products(args: Any) -> None:
    """Products of float32 matrices without TF32."""
    torch.set_float32_matmul_precision("highest")


def without_embedding(
    pre_process: bool, post_process: bool, vp_stage: int | None, *, args: Any = None, build: Any = None
) -> torch.nn.Module:
    """The usual model, whose embedding is not trained."""
    model: torch.nn.Module = build(pre_process, post_process, vp_stage)
    for name, parameter in model.named_parameters():
        if name.startswith("embedding."):
            parameter.requires_grad = False
    return model


def note_pass(args: Any, model: list[torch.nn.Module], store_prefix: str) -> None:
    """Keeps a list of the passes, and how large the weights were."""
    largest = max(float(parameter.detach().abs().max()) for chunk in model for parameter in chunk.parameters())
    with (Path(args.run_dir) / "passes.txt").open("a") as file:
        file.write(f"{store_prefix}log_probs {largest:.6g}\n")


def bounded_advantages(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """No advantage beyond 2, and none for answers that were cut off."""
    for place, truncated in enumerate(rollout_data["truncated"]):
        if truncated:
            rollout_data["loss_masks"][place] = torch.zeros_like(rollout_data["loss_masks"][place])
    if "advantages" in rollout_data:  # on the last pipeline stage
        rollout_data["advantages"] = [advantage.clamp(-2, 2) for advantage in rollout_data["advantages"]]


def gentle_start(
    args: Any, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """Half the learning rate in the first rollout."""
    if rollout_id == 0:
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * opt_param_scheduler.get_lr(group)
