"""The loss of supervised fine-tuning."""

from __future__ import annotations

from torch import Tensor

__all__ = ["sft_loss"]


def sft_loss(log_probs_t: Tensor) -> Tensor:
    """``-log π`` of each token [t], in nats: the cross entropy with the token that is there."""
    return -log_probs_t
