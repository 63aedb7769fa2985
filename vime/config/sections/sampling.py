"""Which groups a rollout takes, and what becomes of the others."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.flags import derived, flag


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What each means in detail: docs/en/advanced/sampling.md."""

    over_sampling_batch_size: int = derived(
        "rollout-batch-size",
        help="Prompts drawn at a time. The first --rollout-batch-size groups that count make the rollout; the others "
        "are kept for the next one.",
    )
    max_refill_rounds: int = flag(
        32,
        help="How many further times a rollout may draw prompts because groups do not count; then the run ends, with "
        "the reasons.",
    )
    partial_rollout: bool = flag(
        False, help="Answers that are not finished when a rollout is full are continued in the next one."
    )
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, help="Do not train tokens that were sampled before an answer was interrupted."
    )
    deterministic_rollout: bool = flag(
        False,
        help="Take groups in the order of their prompts and interrupt none, so that a rollout does not depend on which "
        "answer is finished first.",
    )
    use_fault_tolerance: bool = flag(
        False,
        help="Engines that end or hang are started again, and answers that they were at are sampled anew by others; a "
        "router that ends is started again too. Without it the run ends.",
    )
    max_sample_requeues: int = flag(
        10, help="With --use-fault-tolerance, how many times an answer is tried again before it counts as failed."
    )
    rollout_function_timeout_s: float = flag(
        86400.0,
        help="Deadline of one call of --rollout-function-path or --eval-function-path, and of "
        "--custom-generate-function-path or an async --rollout-sample-hook for one sample, in seconds.",
    )
