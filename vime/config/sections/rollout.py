"""How many answers are sampled, and how."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.flags import flag, required


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Sizes and sampling parameters of a rollout."""

    rollout_batch_size: int = required(help="Prompts of one rollout.")
    n_samples_per_prompt: int = flag(1, help="Answers to each prompt: the size of a group. 8 is usual with GRPO.")
    num_rollout: int | None = flag(None, help="How many rollouts the run has; 0 evaluates only. Wins over --num-epoch.")
    num_epoch: int | None = flag(None, help="How many times the run goes through the prompts.")
    rollout_max_response_len: int = required(help="Most tokens of one response.")
    rollout_max_context_len: int | None = flag(
        None, help="Most tokens of prompt and response together; the model's context otherwise."
    )
    rollout_temperature: float = flag(
        1.0, help="Sampling temperature, above 0. Log-probs are divided by it everywhere."
    )
    rollout_top_p: float = flag(1.0, help="Nucleus sampling; below 1 the engine's log-probs are not the trainer's.")
    rollout_top_k: int = flag(-1, help="Sample from the k likeliest tokens; -1 means all.")
    rollout_stop: tuple[str, ...] = flag((), help="Texts that end a response.")
    rollout_stop_token_ids: tuple[int, ...] = flag((), help="Token ids that end a response.")
    rollout_skip_special_tokens: bool = flag(False, help="Leave special tokens out of the text of a response.")
