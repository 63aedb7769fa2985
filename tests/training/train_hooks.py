"""Hooks that note what they get; used by test_hooks.py through their paths."""

from __future__ import annotations

from typing import Any

import torch

SEEN: list[Any] = []


def init(args: Any) -> None:
    SEEN.append(("init", args.role, torch.distributed.get_world_size()))


def before_log_prob(args: Any, model: Any, store_prefix: str) -> None:
    SEEN.append(("log_prob", store_prefix, len(model)))


def before_step(args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any) -> None:
    SEEN.append(("step", rollout_id, step_id))


def note_data(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    SEEN.append(rollout_data)


def double_advantages(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    for advantage in rollout_data["advantages"]:
        advantage *= 2


def mask_first_sample(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    rollout_data["loss_masks"][0] = torch.zeros_like(rollout_data["loss_masks"][0])


def break_lengths(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    rollout_data["advantages"][1] = rollout_data["advantages"][1][:-1]


def fails(args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any) -> None:
    raise RuntimeError("no budget left")


def another_model(pre_process: bool, post_process: bool, vp_stage: int | None) -> Any:
    return torch.nn.Linear(2, 2)
