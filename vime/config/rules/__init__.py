"""Rules that a configuration must keep, in the order in which their messages are shown, and warnings."""

from vime.config.rules import (
    agent,
    algorithm,
    asynchrony,
    batches,
    critic,
    debugging,
    distillation,
    doubts,
    evaluation,
    files,
    fixed,
    hooks,
    idle,
    layout,
    model,
    presence,
    ranges,
    sampling,
    sft,
    supported,
    weights,
)
from vime.config.rules.base import Rule, Violation, where_sampled

RULES: tuple[Rule, ...] = (
    *presence.RULES,
    *ranges.RULES,
    *batches.RULES,
    *map(where_sampled, sampling.RULES),
    *map(where_sampled, algorithm.RULES),
    *asynchrony.RULES,
    *layout.RULES,
    *debugging.RULES,
    *critic.RULES,
    *fixed.RULES,
    *evaluation.RULES,
    *sft.RULES,
    *distillation.RULES,
    *supported.RULES,
    *hooks.RULES,
    *agent.RULES,
    *files.RULES,
    *weights.RULES,
    *model.RULES,
)
WARNINGS: tuple[Rule, ...] = (
    *doubts.WARNINGS,
    *model.WARNINGS,
    *idle.WARNINGS,
    *algorithm.WARNINGS,
    *asynchrony.WARNINGS,
    *critic.WARNINGS,
    *sft.WARNINGS,
)

__all__ = ["RULES", "WARNINGS", "Rule", "Violation"]
