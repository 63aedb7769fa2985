"""Which samples count."""

from __future__ import annotations

from typing import Any

from vime.observe.rollout_metrics import repeats_itself
from vime.types import Group


def remove_repetitions(args: Any, groups: list[Group]) -> None:
    """Does not train on answers that say the same thing again and again."""
    for sample in (sample for group in groups for sample in group):
        if repeats_itself(sample.response):
            sample.remove_sample = True
