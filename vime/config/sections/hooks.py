"""Custom functions, each as package.module:function (package.module.function works too)."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.flags import derived, flag


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What each is called with stands in ``vime.plugins.CONTRACTS``; all are resolved before anything starts."""

    custom_rm_path: str | None = flag(None, help="Grades a sample, or a whole group with --group-rm.")
    custom_generate_function_path: str | None = flag(None, help="Generates one sample: tools, several turns, agents.")
    custom_reward_post_process_path: str | None = flag(None, help="Turns rewards into what advantages are made from.")
    rollout_function_path: str | None = flag(None, help="Replaces the whole generation of a rollout.")
    eval_function_path: str | None = derived("rollout-function-path", help="Replaces the whole evaluation.")
    data_source_path: str | None = flag(None, help="Class that prompts come from, instead of --prompt-data.")
    dynamic_sampling_filter_path: str | None = flag(
        None, help="Says whether a group counts; a group that does not is replaced."
    )
    buffer_filter_path: str | None = flag(None, help="Chooses which waiting groups are continued first.")
    rollout_sample_hook: tuple[str, ...] = flag((), repeats=True, help="Looks at each generated sample, or changes it.")
    rollout_sample_filter_path: str | None = flag(None, help="Marks samples of a finished rollout as not trained on.")
    rollout_all_samples_process_path: str | None = flag(
        None, help="Sees all finished groups of a rollout, also those that a filter dropped."
    )
    custom_convert_samples_to_train_data_path: str | None = flag(
        None, help="Makes the rows that are trained on, instead of one from each sample."
    )
    custom_rollout_log_function_path: str | None = flag(None, help="Logs a rollout; a true result replaces our log.")
    custom_eval_rollout_log_function_path: str | None = flag(None, help="Logs an evaluation, in the same way.")
    custom_update_weight_post_write_path: str | None = flag(
        None, help="Sees each version of the weights that was written to a disk, before engines load it."
    )
    custom_megatron_init_path: str | None = flag(None, help="Sets up a rank of the trainer before its model is built.")
    custom_model_provider_path: str | None = flag(None, help="Changes the model before it is wrapped for training.")
    custom_megatron_before_log_prob_hook_path: str | None = flag(
        None, help="Prepares the model for a pass without gradients."
    )
    rollout_data_postprocess_path: str | None = flag(
        None, help="Changes advantages, log-probs or masks of a rollout before it is trained on."
    )
    custom_advantage_function_path: str | None = flag(None, help="Advantages, in place of --advantage-estimator.")
    custom_tis_function_path: str | None = flag(None, help="Off-policy correction, in place of that of --use-tis.")
    custom_pg_loss_reducer_function_path: str | None = flag(
        None, help="Makes one number of the policy loss of all tokens."
    )
    custom_loss_function_path: str | None = flag(None, help="The whole loss, with --loss-type custom_loss.")
    custom_megatron_before_train_step_hook_path: str | None = flag(None, help="Acts before each optimizer step.")
