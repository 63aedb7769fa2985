"""Fine-tuning on given dialogues (--loss-type sft_loss): what it needs, and what has no meaning there."""

from __future__ import annotations

from collections.abc import Iterator

from vime.config.config import OWN_FLAGS, Config
from vime.config.rules.base import Violation, option

IDLE_SECTIONS = ("engine", "sampling", "reward", "asynchrony", "off_policy", "critic")
IDLE = (
    "colocate offload offload_train offload_rollout rollout_num_gpus_per_engine "
    "rollout_max_response_len rollout_top_p rollout_top_k rollout_stop rollout_stop_token_ids "
    "rollout_skip_special_tokens rollout_max_prompt_len n_samples_per_eval_prompt eval_max_response_len "
    "eval_temperature eval_top_p eval_top_k eval_max_prompt_len eval_max_context_len eval_min_new_tokens "
    "custom_rm_path custom_generate_function_path custom_reward_post_process_path rollout_sample_filter_path "
    "custom_rollout_log_function_path custom_eval_rollout_log_function_path rollout_sample_hook "
    "rollout_all_samples_process_path custom_convert_samples_to_train_data_path "
    "dynamic_sampling_filter_path "
    "custom_megatron_before_log_prob_hook_path custom_advantage_function_path custom_tis_function_path "
    "custom_pg_loss_reducer_function_path custom_loss_function_path critic_num_nodes critic_num_gpus_per_node "
    "colocate_critic save_debug_rollout_data load_debug_rollout_data"
)
"""Flags of sampling, grading and engines."""

USED_OF_ALGORITHM = (
    "loss_type disable_compute_advantages_and_returns reset_optimizer_states "
    "mtp_num_layers enable_mtp_training mtp_loss_scaling_factor"
)


def one_sample(config: Config) -> Iterator[Violation]:
    count = config.rollout.n_samples_per_prompt
    if config.algorithm.is_sft and count != 1:
        yield Violation(
            f"--n-samples-per-prompt {count}: with --loss-type sft_loss a dialogue is one sample; only 1 is possible",
            ("n_samples_per_prompt",),
        )


def plain_log_probs(config: Config) -> Iterator[Violation]:
    temperature = config.rollout.rollout_temperature
    if config.algorithm.is_sft and temperature != 1:
        yield Violation(
            f"--rollout-temperature {temperature}: with --loss-type sft_loss nothing is sampled, and log-probs are "
            "those of temperature 1",
            ("rollout_temperature",),
        )


def evaluation_data(config: Config) -> Iterator[Violation]:
    evaluation, hooks = config.evaluation, config.hooks
    if not config.algorithm.is_sft:
        return
    if hooks.eval_function_path is not None and not config.origins["eval_function_path"].startswith("derived"):
        yield Violation("--eval-function-path: an evaluation of --loss-type sft_loss is the loss on --eval-prompt-data")
    given = evaluation.eval_prompt_data or evaluation.eval_config
    if evaluation.eval_interval is not None and hooks.eval_function_path is not None and not given:
        yield Violation("--eval-interval needs --eval-prompt-data NAME FILE: what to evaluate on")


def advantages_needed(config: Config) -> Iterator[Violation]:
    if config.algorithm.disable_compute_advantages_and_returns and config.algorithm.loss_type == "policy_loss":
        yield Violation(
            f"--disable-compute-advantages-and-returns: --loss-type {config.algorithm.loss_type} needs advantages"
        )


def without_effect(config: Config) -> Iterator[Violation]:
    """One line for all: scripts for reinforcement learning may be used as they are."""
    if not config.algorithm.is_sft:
        return
    given = [
        name for name, origin in config.origins.items() if origin != "default" and not origin.startswith("derived")
    ]
    idle = [option(name) for name in given if is_idle(name)]
    if idle:
        yield Violation(f"--loss-type sft_loss samples and grades nothing; without effect: {', '.join(idle)}")


def is_idle(name: str) -> bool:
    """Whether a flag has no effect in fine-tuning."""
    if name not in OWN_FLAGS:
        return name.startswith(("vllm_", "router_"))
    section = OWN_FLAGS[name].section
    return (
        section in IDLE_SECTIONS
        or name in IDLE.split()
        or (section == "algorithm" and name not in USED_OF_ALGORITHM.split())
    )


RULES = (one_sample, plain_log_probs, evaluation_data, advantages_needed)
WARNINGS = (without_effect,)
