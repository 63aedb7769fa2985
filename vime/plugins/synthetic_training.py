"""Values to try hooks of the trainer on: small tensors and a small model of torch in the places of Megatron's."""

from __future__ import annotations

from typing import Any

import torch

LENGTHS = (3, 1, 4, 2)
PROMPT_LENGTH = 5
VOCABULARY = 16


class Stage(torch.nn.Module):
    """A stand-in for a chunk of the model, with the names of its parts."""

    def __init__(self, pre_process: bool, post_process: bool, vp_stage: int | None = None) -> None:
        super().__init__()
        if pre_process:
            self.embedding = torch.nn.Module()
            self.embedding.word_embeddings = torch.nn.Embedding(VOCABULARY, 8)
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        if post_process:
            self.output_layer = torch.nn.Linear(8, VOCABULARY, bias=False)


class Scheduler:
    """A stand-in for Megatron's OptimizerParamScheduler, at a constant learning rate."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.num_steps = optimizer, 0

    def get_lr(self, param_group: dict[str, Any]) -> float:
        return 1e-6

    def step(self, increment: int) -> None:
        self.num_steps += increment

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}


def learner() -> tuple[Stage, torch.optim.Optimizer, Scheduler]:
    """A model, its optimizer and its scheduler."""
    model = Stage(True, True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    return model, optimizer, Scheduler(optimizer)


def rollout_data(*, last_stage: bool = True) -> dict[str, Any]:
    """What ``vime.training.rollout_data`` gives to hooks, of four samples of two groups."""
    count = len(LENGTHS)

    def per_token(value: float) -> list[torch.Tensor]:
        return [torch.full((length,), value) - 0.1 * torch.arange(length) for length in LENGTHS]

    data: dict[str, Any] = {
        "tokens": [torch.arange(PROMPT_LENGTH + length) for length in LENGTHS],
        "total_lengths": [PROMPT_LENGTH + length for length in LENGTHS],
        "response_lengths": list(LENGTHS),
        "sample_indices": list(range(count)),
        "group_indices": [0, 0, 1, 1],
        "parent_indices": [None] * count,
        "raw_reward": [1.0, 0.0, 1.0, 1.0],
        "rewards": [0.7, -0.7, 0.0, 0.0],
        "graded": [True, True, True, True],
        "truncated": [False, True, False, False],
        "metadata": [None] * count,
        "loss_masks": [torch.ones(length, dtype=torch.int64) for length in LENGTHS],
        "rollout_log_probs": per_token(-1.0),
    }
    data["loss_masks"][2][1] = 0
    if last_stage:
        data["log_probs"], data["ref_log_probs"] = per_token(-1.1), per_token(-1.2)
        data["advantages"] = [torch.full((length,), a) for length, a in zip(LENGTHS, data["rewards"], strict=True)]
    return data
