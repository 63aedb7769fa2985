"""Runs of one side alone: what they need, and what they cannot do."""

from __future__ import annotations

from collections.abc import Iterator

from vime.config.config import Config
from vime.config.rules.base import Violation


def debug_modes(config: Config) -> Iterator[Violation]:
    ops = config.ops
    if ops.debug_rollout_only and ops.debug_train_only:
        cause = "--load-debug-rollout-data" if ops.load_debug_rollout_data else "--debug-train-only"
        yield Violation(f"--debug-rollout-only and {cause} exclude each other")
    if ops.debug_train_only and ops.load_debug_rollout_data is None and not config.algorithm.is_sft:
        yield Violation("--debug-train-only needs --load-debug-rollout-data: what to train on")


def saved_rollouts(config: Config) -> Iterator[Violation]:
    """A trainer learns from files; prompts, engines and evaluations stand still."""
    if config.ops.load_debug_rollout_data is None or config.algorithm.is_sft:
        return
    if not config.rollout.num_rollout:
        yield Violation("--load-debug-rollout-data needs --num-rollout: how many were saved", ("num_rollout",))
    if config.algorithm.needs_critic:
        yield Violation(
            f"--load-debug-rollout-data trains no critic: --advantage-estimator {config.algorithm.advantage_estimator} "
            "needs one",
            ("advantage_estimator",),
        )
    if config.checkpoint.save is not None:
        yield Violation(
            "--save and --load-debug-rollout-data exclude each other: prompts stand still, so no run could go on from "
            "such a checkpoint (--run-dir says where metrics go)"
        )


RULES = (debug_modes, saved_rollouts)
