"""Flags that must be there, and flags that need others."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from vime.config import megatron_core
from vime.config.config import OWN_FLAGS, Config
from vime.config.rules.base import Violation, option, where_sampled
from vime.config.sections.reward import needs_label

NOT_IN_SFT = ("rollout_max_response_len",)
"""Required where answers are sampled, and without a meaning where they are given."""


def required_flags(config: Config) -> Iterator[Violation]:
    values = config.flat()
    for name, flag in OWN_FLAGS.items():
        unused = config.algorithm.is_sft and name in NOT_IN_SFT
        if flag.required and values[name] is None and not unused:
            yield Violation(f"{flag.option} is required ({flag.help.rstrip('.')})", (name,), lacking=True)


def run_length(config: Config) -> Iterator[Violation]:
    rollout = config.rollout
    if rollout.num_rollout is None and rollout.num_epoch is None:
        about = ("num_rollout", "num_epoch")
        yield Violation("--num-rollout or --num-epoch is required: how long the run is", about, lacking=True)
    if rollout.num_rollout == 0 and config.evaluation.eval_interval is None:
        yield Violation("--num-rollout 0 only evaluates: give --eval-interval and --eval-prompt-data")
    if rollout.num_rollout == 0 and config.evaluation.skip_eval_before_train:
        yield Violation("--num-rollout 0 only evaluates: leave --skip-eval-before-train out")


def prompts(config: Config) -> Iterator[Violation]:
    saved = config.ops.debug_train_only and not config.algorithm.is_sft
    replaced = config.hooks.data_source_path is not None or saved
    if config.data.prompt_data is None and not replaced:
        message = "--prompt-data is required (or --data-source-path): where the prompts come from"
        yield Violation(message, lacking=True)


def rollout_slots(config: Config) -> Iterator[Violation]:
    given: int | None = config.cluster.rollout_num_gpus
    if given is None:
        yield Violation(
            "--rollout-num-gpus is required without --colocate: how many slots the engines get",
            ("rollout_num_gpus",),
            lacking=True,
        )


def weights_on_a_disk(config: Config) -> Iterator[Violation]:
    engine = config.engine
    on_disk, folder = engine.update_weight_transport == "disk", engine.update_weight_disk_dir
    if on_disk and folder is None:
        yield Violation(
            "--update-weight-transport disk needs --update-weight-disk-dir: a folder that trainer, driver and engines "
            "see under the same path",
            ("update_weight_disk_dir",),
        )
    if folder is not None and Path(folder).is_file():
        yield Violation(f"--update-weight-disk-dir {folder}: is a file, not a folder", ("update_weight_disk_dir",))
    useless = {
        "update_weight_disk_dir": folder is not None,
        "update_weight_disk_keep_files": engine.update_weight_disk_keep_files,
        "custom_update_weight_post_write_path": config.hooks.custom_update_weight_post_write_path is not None,
    }
    for name, given in useless.items():
        if given and not on_disk:
            yield Violation(f"{option(name)} has no effect without --update-weight-transport disk", (name,))


def grading(config: Config) -> Iterator[Violation]:
    reward, hooks = config.reward, config.hooks
    graded_elsewhere = hooks.custom_rm_path or hooks.custom_generate_function_path or hooks.rollout_function_path
    taught = config.distillation.use_opd and config.evaluation.eval_interval is None  # rewards are 0 then
    if reward.rm_type is None and not graded_elsewhere and config.has_engines and not taught:
        yield Violation("--rm-type or --custom-rm-path is required: how answers are graded", ("rm_type",), lacking=True)
    if reward.rm_type is not None and reward.rm_type.endswith("remote_rm") and reward.rm_url is None:
        yield Violation(f"--rm-type {reward.rm_type} needs --rm-url: the address of the reward service", ("rm_url",))
    if reward.group_rm and hooks.custom_rm_path is None:
        yield Violation("--group-rm needs --custom-rm-path: only a custom function can grade a whole group")


def labels(config: Config) -> Iterator[Violation]:
    rm_type = config.reward.rm_type
    by_rule = rm_type is not None and needs_label(rm_type) and config.hooks.custom_rm_path is None
    if by_rule and config.has_engines and config.data.label_key is None and config.hooks.data_source_path is None:
        yield Violation(f"--rm-type {rm_type} compares with a label: give --label-key", ("label_key",), lacking=True)


def reference_model(config: Config) -> Iterator[Violation]:
    algorithm = config.algorithm
    if algorithm.kl_loss_coef != 0 and not algorithm.use_kl_loss:
        yield Violation(f"--kl-loss-coef {algorithm.kl_loss_coef} needs --use-kl-loss")
    if algorithm.needs_reference and config.checkpoint.ref_load is None:
        named = config.checkpoint.hf_checkpoint or "FOLDER"
        cause = "--use-kl-loss" if algorithm.use_kl_loss else "a KL coefficient"
        yield Violation(f"{cause} needs a reference model: give --ref-load (--ref-load {named} will do)", ("ref_load",))


def partners(config: Config) -> Iterator[Violation]:
    if config.checkpoint.save_interval is not None and config.checkpoint.save is None:
        yield Violation("--save-interval needs --save: the folder for checkpoints", ("save",))
    if config.checkpoint.save_hf is not None and config.checkpoint.save is None:
        yield Violation("--save-hf needs --save: it is written along with each checkpoint", ("save",))
    batch = config.batch
    if batch.use_dynamic_batch_size and batch.max_tokens_per_gpu is None:
        yield Violation(
            "--use-dynamic-batch-size needs --max-tokens-per-gpu: how much to pack together", ("max_tokens_per_gpu",)
        )
    if config.engine.vllm_router_ip is not None and config.engine.vllm_router_port is None:
        yield Violation("--vllm-router-ip needs --vllm-router-port", ("vllm_router_port",))


def wandb_installed(config: Config) -> Iterator[Violation]:
    if config.ops.use_wandb and importlib.util.find_spec("wandb") is None:
        yield Violation('--use-wandb needs the package wandb, which is not installed: pip install "vime[wandb]"')


def graders_installed(config: Config) -> Iterator[Violation]:
    rm_type = config.reward.rm_type or ""
    if rm_type.endswith("ifbench") and importlib.util.find_spec("if_verifiable") is None:
        yield Violation(
            f'--rm-type {rm_type} needs the package if-verifiable, which is not installed: pip install "vime[ifbench]"'
        )


def megatron_version(config: Config) -> Iterator[Violation]:
    core = megatron_core.found()
    if core is not None and core.problem is not None:
        yield Violation(core.problem)


RULES = (
    megatron_version,
    required_flags,
    run_length,
    prompts,
    rollout_slots,
    *map(where_sampled, (grading, labels, graders_installed, reference_model)),
    partners,
    weights_on_a_disk,
    wandb_installed,
)
