"""The measures: one module each, with ``measure(folder) -> dict``, whose "value" is what the target is for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is known of a measure without running it."""

    name: str
    target: str  # for people
    timeout_s: float
    package: str = "bench.measures"

    @property
    def module(self) -> str:
        return f"{self.package}.{self.name}"


MEASURES = (
    Entry(name="rollout_ratio", target=">= 0.9", timeout_s=420),
    Entry(name="train_ratio", target=">= 1.1", timeout_s=600),
    Entry(name="layout_ratio", target="<= 1.5", timeout_s=600),
    Entry(name="grpo_step_vs_trl", target="<= 0.6", timeout_s=600),
    Entry(name="sync_s", target="<= 1", timeout_s=300),
    Entry(name="overhead_share", target="<= 0.03", timeout_s=400),
    Entry(name="async_ratio", target="<= 0.6", timeout_s=400),
    Entry(name="swap_wait_ratio", target="<= 0.5", timeout_s=400),
    Entry(name="convert_ratio", target="none", timeout_s=300),
)
