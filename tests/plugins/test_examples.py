"""What examples of custom functions make of cases that their contracts name."""

from __future__ import annotations

import torch

from examples.plugins import losses


def test_a_sample_without_a_reward_is_in_no_baseline_of_leave_one_out() -> None:
    data = {
        "group_indices": [0, 0, 0],
        "raw_reward": [1.0, 0.5, 0.0],
        "graded": [True, True, False],
        "loss_masks": [torch.ones(2), torch.ones(1), torch.zeros(1)],
    }
    losses.leave_one_out(None, data)
    assert [row.tolist() for row in data["advantages"][:2]] == [[0.5, 0.5], [-0.5]]
