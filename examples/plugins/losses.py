"""Functions that take part in advantages and losses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def leave_one_out(args: Any, rollout_data: dict[str, Any]) -> None:
    """RLOO: the baseline of a sample is the mean reward of the others of its group (https://arxiv.org/abs/2402.14740).

    A rank has whole groups only where there is one data-parallel rank; others would have to exchange rewards.
    """
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for group, reward, graded in zip(
        rollout_data["group_indices"], rollout_data["raw_reward"], rollout_data["graded"], strict=True
    ):
        if graded:  # the others are not trained on, and their reward is not a 0
            groups[group].append(reward)
    advantages = []
    for group, reward, mask in zip(
        rollout_data["group_indices"], rollout_data["raw_reward"], rollout_data["loss_masks"], strict=True
    ):
        others = max(len(groups[group]) - 1, 1)
        baseline = (sum(groups[group]) - reward) / others
        advantages.append(torch.full(mask.shape, reward - baseline, dtype=torch.float32, device=mask.device))
    rollout_data["advantages"] = advantages


def clipped_weights(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Truncated importance sampling, and no token whose log-probs differ by more than 5 nats."""
    difference = torch.cat(train_log_probs) - torch.cat(rollout_log_probs)
    weights = difference.clamp(-20, 20).exp().clamp(max=args.tis_clip)
    near = (difference.abs() < 5).split(response_lengths)
    masks = [mask * close for mask, close in zip(loss_masks, near, strict=True)]
    return pg_loss * weights, masks, {"custom_weight": weights}


def constant_length(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[Tensor], calculate_per_token_loss: bool
) -> Callable[[Tensor], Tensor]:
    """Dr.GRPO: the sum of a sample is divided by 1000 tokens, however long it is (https://arxiv.org/abs/2503.20783)."""
    mask = torch.cat(loss_masks)
    return lambda loss: (loss * mask).sum() / (1 if calculate_per_token_loss else 1000)


def reinforce(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """``-A log π``, without ratio and clip."""
    log_probs = torch.log_softmax(logits.float() / args.rollout_temperature, -1)
    chosen = log_probs.gather(1, torch.cat(batch["response_tokens"])[:, None]).squeeze(1)
    loss = sum_of_sample_mean(-torch.cat(batch["advantages"]) * chosen)
    return loss, {"chosen_log_prob": sum_of_sample_mean(chosen)}
