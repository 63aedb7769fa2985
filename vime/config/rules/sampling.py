"""Which groups a rollout takes: sizes, and what excludes each other."""

from __future__ import annotations

from collections.abc import Iterator

from vime.config.config import Config
from vime.config.rules.base import Violation, is_given, known, option

REPLACED = (
    *("over_sampling_batch_size", "max_refill_rounds", "partial_rollout", "deterministic_rollout"),
    *("dynamic_sampling_filter_path", "buffer_filter_path"),
)
"""Flags of the sampling loop, in whose place a rollout function stands."""


def over_sampling(config: Config) -> Iterator[Violation]:
    drawn, wanted = config.sampling.over_sampling_batch_size, config.rollout.rollout_batch_size
    if known(drawn, wanted) and drawn < wanted:
        yield Violation(
            f"--over-sampling-batch-size {drawn} must be at least --rollout-batch-size {wanted}: a rollout takes its "
            "groups from those that are drawn",
            ("over_sampling_batch_size", "rollout_batch_size"),
        )


def interruption(config: Config) -> Iterator[Violation]:
    sampling = config.sampling
    if sampling.partial_rollout and sampling.deterministic_rollout:
        yield Violation(
            "--partial-rollout and --deterministic-rollout exclude each other: what is interrupted depends on what was "
            "finished first"
        )
    if sampling.mask_offpolicy_in_partial_rollout and not sampling.partial_rollout:
        yield Violation("--mask-offpolicy-in-partial-rollout needs --partial-rollout: nothing is continued without it")


def replaced(config: Config) -> Iterator[Violation]:
    hooks = config.hooks
    given = [option(name) for name in REPLACED if is_given(config, name)]
    if hooks.rollout_function_path is not None and given:
        yield Violation(
            f"{', '.join(given)}: without effect beside --rollout-function-path, which takes the place of the sampling "
            "loop; leave one of them out"
        )
    if hooks.data_source_path is not None and hooks.buffer_filter_path is not None:
        yield Violation(
            "--buffer-filter-path has no effect beside --data-source-path, whose class keeps what is given back to it: "
            "leave one of them out"
        )


def requeues(config: Config) -> Iterator[Violation]:
    if is_given(config, "max_sample_requeues") and not config.sampling.use_fault_tolerance:
        yield Violation("--max-sample-requeues needs --use-fault-tolerance: a dead engine ends the run without it")


RULES = (over_sampling, interruption, replaced, requeues)
