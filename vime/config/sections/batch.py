"""How the samples of a rollout become optimizer steps and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vime.config.flags import derived, flag


@dataclass(frozen=True, kw_only=True)
class Batch:
    """rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout, always exactly."""

    global_batch_size: int = derived(
        "rollout-batch-size x n-samples-per-prompt / num-steps-per-rollout", help="Samples of one optimizer step."
    )
    num_steps_per_rollout: int = derived(
        "rollout-batch-size x n-samples-per-prompt / global-batch-size", help="Optimizer steps of one rollout."
    )
    micro_batch_size: int = flag(1, help="Samples of one forward pass, without --use-dynamic-batch-size.")
    use_dynamic_batch_size: bool = flag(False, help="Pack samples up to --max-tokens-per-gpu. The loss stays the same.")
    max_tokens_per_gpu: int | None = flag(None, help="Most tokens of one packed micro-batch.")
    log_probs_max_tokens_per_gpu: int | None = derived(
        "max-tokens-per-gpu", help="The same for passes without gradients, which need less memory."
    )
    balance_data: bool = flag(False, help="Spread samples over the ranks so that each has about as many tokens.")
    calculate_per_token_loss: bool = flag(False, help="Weigh every token alike instead of every sample.")
    train_memory_margin_bytes: int = flag(1 << 30, help="Memory to leave free on a device while training.")
    qkv_format: Literal["thd"] = flag(
        "thd",
        instead={"bshd": "samples are always packed, which is thd"},
        help="Accepted for old command lines: samples are always packed.",
    )
    recompute_loss_function: bool = flag(
        False,
        help="Accepted for old command lines: logits are always computed once more where they would take much memory.",
    )
