"""Evaluation between rollouts. What is not given is as in rollouts."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.flags import derived, flag


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Data sets and sampling parameters of evaluations."""

    eval_interval: int | None = flag(None, help="Evaluate before the first rollout and after every so many.")
    eval_prompt_data: tuple[tuple[str, str], ...] = flag(
        (), help="Name and .jsonl file of a data set; may be repeated, or hold several pairs."
    )
    eval_config: str | None = flag(
        None, help="YAML with data sets, each with its own sampling parameters; see ``vime.config.eval_datasets``."
    )
    n_samples_per_eval_prompt: int = flag(1, help="Answers to each prompt.")
    eval_max_response_len: int = derived("rollout-max-response-len", help="Most tokens of one response.")
    eval_temperature: float = derived("rollout-temperature", help="Sampling temperature; 0 takes the likeliest token.")
    eval_top_p: float = derived("rollout-top-p", help="Nucleus sampling.")
    eval_top_k: int = derived("rollout-top-k", help="Sample from the k likeliest tokens; -1 means all.")
    eval_max_prompt_len: int | None = derived("rollout-max-prompt-len", help="Longer prompts are dropped.")
    eval_max_context_len: int | None = derived("rollout-max-context-len", help="Most tokens of prompt and response.")
    eval_input_key: str = derived("input-key", help="Key of a row that holds the prompt.")
    eval_label_key: str | None = derived("label-key", help="Key of a row that holds the right answer.")
    eval_min_new_tokens: int = flag(0, help="Fewest tokens of one response.")
    skip_eval_before_train: bool = flag(False, help="No evaluation before the first rollout.")
