"""How messages name rollouts: people count them from 1, file names, metrics and arguments of hooks have the id."""

from __future__ import annotations

__all__ = ["evaluation_name", "rollout_name"]


def rollout_name(rollout_id: int | None) -> str:
    """``rollout 1`` is the one whose id is 0."""
    return "no rollout" if rollout_id is None else f"rollout {rollout_id + 1}"


def evaluation_name(rollout_id: int) -> str:
    """The evaluation that comes before the rollout of this id, named by the one after which it is done."""
    return f"evaluation after rollout {rollout_id}" if rollout_id else "evaluation before rollout 1"
