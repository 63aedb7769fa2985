"""Values that follow from others, and where they say they come from."""

from __future__ import annotations

import pytest

from vime.config import parse_config, resolve


def test_one_step_a_rollout_without_more_said(flags):
    batch = parse_config(flags()).batch  # 8 prompts x 4 samples
    assert (batch.global_batch_size, batch.num_steps_per_rollout) == (32, 1)


@pytest.mark.parametrize(
    ("words", "size", "steps"),
    [
        ("--global-batch-size 16", 16, 2),
        ("--num-steps-per-rollout 4", 8, 4),
        ("--global-batch-size 8 --num-steps-per-rollout 4", 8, 4),
    ],
)
def test_batch_size_and_steps_follow_from_each_other(flags, words, size, steps):
    batch = parse_config(flags(*words.split())).batch
    assert (batch.global_batch_size, batch.num_steps_per_rollout) == (size, steps)


def test_origins_say_default_command_line_or_what_a_value_was_derived_from(flags):
    origins = parse_config(flags("--global-batch-size", "16")).origins
    assert origins["lr"] == "default"
    assert origins["global_batch_size"] == "command line"
    assert origins["num_steps_per_rollout"] == "derived: rollout-batch-size x n-samples-per-prompt / global-batch-size"


def test_the_upper_clip_is_the_lower_one_unless_given(flags):
    assert parse_config(flags("--eps-clip", "0.1")).algorithm.eps_clip_high == 0.1
    assert parse_config(flags("--eps-clip", "0.1", "--eps-clip-high", "0.28")).algorithm.eps_clip_high == 0.28


def test_evaluation_is_as_rollouts_unless_given(flags):
    words = (
        "--rollout-temperature 0.7 --rollout-max-prompt-len 100 --input-key prompt --reward-key acc --eval-top-p 0.5"
    )
    config = parse_config(flags(*words.split()))
    evaluation = config.evaluation
    assert evaluation.eval_temperature == 0.7
    assert evaluation.eval_max_response_len == 64
    assert evaluation.eval_max_prompt_len == 100
    assert (evaluation.eval_input_key, evaluation.eval_label_key) == ("prompt", "label")
    assert config.reward.eval_reward_key == "acc"
    assert (evaluation.eval_top_p, config.rollout.rollout_top_p) == (0.5, 1.0)


def test_greedy_evaluation_is_a_value_like_any_other(flags):
    assert parse_config(flags("--eval-temperature", "0")).evaluation.eval_temperature == 0.0


def test_colocated_engines_use_the_training_slots(flags):
    resolution = resolve(flags("--actor-num-gpus-per-node", "4"))
    assert (resolution.config.cluster.rollout_num_gpus, resolution.warnings) == (4, ())


def test_colocate_ignores_rollout_slots_with_one_warning_that_says_the_number(flags):
    resolution = resolve(flags("--actor-num-gpus-per-node", "4", "--rollout-num-gpus", "2"))
    assert resolution.config.cluster.rollout_num_gpus == 4
    assert resolution.config.origins["rollout_num_gpus"] == "derived: colocate shares the training slots"
    assert resolution.warnings == (
        "--rollout-num-gpus 2 is ignored under --colocate: the engines use the 4 training slots",
    )


def test_without_colocate_the_given_slots_hold(flags):
    config = resolve(flags("--no-colocate", "--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2")).config
    assert (config.cluster.rollout_num_gpus, config.cluster.num_engines) == (4, 2)


def test_one_sample_a_prompt_has_no_standard_deviation(flags):
    assert parse_config(flags()).algorithm.disable_grpo_std_normalization is False
    assert parse_config(flags("--n-samples-per-prompt", "1")).algorithm.disable_grpo_std_normalization is True


def test_bf16_unless_another_precision_is_given(flags):
    assert parse_config(flags()).parallel.dtype_name == "bfloat16"
    assert parse_config(flags("--fp32")).parallel.dtype_name == "float32"
    assert parse_config(flags("--fp16")).parallel.dtype_name == "float16"


def test_the_run_folder_stands_with_the_checkpoints_and_holds_the_curves(flags, tmp_path):
    ops = parse_config(flags()).ops
    assert ops.run_dir == f"{tmp_path}/save"
    assert ops.tensorboard_dir == f"{tmp_path}/save/tensorboard"


def test_given_folders_hold(flags):
    ops = parse_config(flags("--run-dir", "r", "--tensorboard-dir", "t")).ops
    assert (ops.run_dir, ops.tensorboard_dir) == ("r", "t")


def test_passes_without_gradients_take_as_many_tokens(flags):
    words = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "512")
    assert parse_config(flags(*words)).batch.log_probs_max_tokens_per_gpu == 512


def test_saved_rollouts_are_only_trained_on(flags):
    config = resolve(flags("--load-debug-rollout-data", "dump/{rollout_id}.json")).config
    assert config.ops.debug_train_only is True
