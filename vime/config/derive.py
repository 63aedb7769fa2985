"""Values that follow from others. A value that was given is never overwritten, except where the guide says so:
``--colocate`` fixes the number of rollout slots, with one warning."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from vime.algorithms import advantages

FULLY_ASYNC = "vime.rollout.fully_async.generate_rollout"

Values = dict[str, Any]
Derived = tuple[Any, str] | None
"""A value and what it was derived from, or nothing where a rule will complain instead."""


def _samples(values: Values) -> int | None:
    prompts, n = values["rollout_batch_size"], values["n_samples_per_prompt"]
    return None if prompts is None or n is None else prompts * n


def _steps(values: Values) -> Derived:
    samples, size = _samples(values), values["global_batch_size"]
    if size is None:
        return 1, "one step a rollout"
    if samples is None or size < 1 or samples % size:
        return None
    return samples // size, "rollout-batch-size x n-samples-per-prompt / global-batch-size"


def _global_batch_size(values: Values) -> Derived:
    samples, steps = _samples(values), values["num_steps_per_rollout"]
    if samples is None or not steps or steps < 1 or samples % steps:
        return None
    return samples // steps, "rollout-batch-size x n-samples-per-prompt / num-steps-per-rollout"


def _rollout_num_gpus(values: Values) -> Derived:
    slots = values["actor_num_nodes"] * values["actor_num_gpus_per_node"]
    if values["loss_type"] == "sft_loss":
        return 0, "sft_loss has no engines"
    if values["debug_train_only"]:
        return 0, "debug-train-only has no engines"
    return (slots, "colocate shares the training slots") if values["colocate"] else None


def _run_dir(values: Values) -> Derived:
    if values["save"] is not None:
        return values["save"], "save"
    return os.path.join("runs", time.strftime("%Y%m%d-%H%M%S")), "the time of the start"


def _rm_workers(values: Values) -> Derived:
    return max(1, min(8, (os.cpu_count() or 2) // 2)), "half of the cores, 1 to 8"


def _like(source: str) -> Callable[[Values], Derived]:
    return lambda values: (values[source], source.replace("_", "-"))


def _like_with_critic(source: str) -> Callable[[Values], Derived]:
    def derived(values: Values) -> Derived:
        samples = values["loss_type"] != "sft_loss"
        has_critic = samples and advantages.get(values["advantage_estimator"]).needs_critic
        return (values[source], source.replace("_", "-")) if has_critic else None

    return derived


def _use_tis(values: Values) -> Derived:
    """Only where the loss has a place for it and the log-probs of both sides are of the same distribution."""
    whole = values["rollout_top_p"] == 1 and values["rollout_top_k"] == -1
    able = values["loss_type"] == "policy_loss" and not values["use_rollout_logprobs"] and whole
    return able and (values["max_staleness"] or 0) > 0, "max-staleness"


def _groups_ahead(values: Values) -> Derived:
    most, size = values["max_staleness"], values["rollout_batch_size"]
    if most is None or size is None:
        return None
    return (most + 1) * size, "max-staleness and rollout-batch-size"


DERIVATIONS: dict[str, Callable[[Values], Derived]] = {
    "debug_train_only": lambda v: (v["load_debug_rollout_data"] is not None, "load-debug-rollout-data"),
    "rollout_num_gpus": _rollout_num_gpus,
    "over_sampling_batch_size": _like("rollout_batch_size"),
    "critic_num_nodes": _like_with_critic("actor_num_nodes"),
    "critic_num_gpus_per_node": _like_with_critic("actor_num_gpus_per_node"),
    "critic_lr": _like("lr"),
    "num_steps_per_rollout": _steps,
    "global_batch_size": _global_batch_size,
    "log_probs_max_tokens_per_gpu": _like("max_tokens_per_gpu"),
    "eps_clip_high": _like("eps_clip"),
    "disable_grpo_std_normalization": lambda v: (
        v["n_samples_per_prompt"] == 1 or v["use_dr_grpo"],
        "n-samples-per-prompt and use-dr-grpo",
    ),
    "dr_grpo_divisor": _like("rollout_max_response_len"),
    "offload_train": lambda v: (
        v["colocate"] or v["colocate_critic"] or v["offload"],
        "colocate, colocate-critic and offload",
    ),
    "offload_rollout": lambda v: (v["colocate"] or v["offload"], "colocate and offload"),
    "expert_tensor_parallel_size": _like("tensor_model_parallel_size"),
    "bf16": lambda v: (not (v["fp16"] or v["fp32"]), "fp16 and fp32"),
    "eval_reward_key": _like("reward_key"),
    "rm_workers": _rm_workers,
    "eval_max_response_len": _like("rollout_max_response_len"),
    "eval_temperature": _like("rollout_temperature"),
    "eval_top_p": _like("rollout_top_p"),
    "eval_top_k": _like("rollout_top_k"),
    "eval_max_prompt_len": _like("rollout_max_prompt_len"),
    "eval_max_context_len": _like("rollout_max_context_len"),
    "eval_input_key": _like("input_key"),
    "eval_label_key": _like("label_key"),
    "run_dir": _run_dir,
    "tensorboard_dir": lambda v: (os.path.join(v["run_dir"], "tensorboard"), "run-dir"),
    "eval_function_path": _like("rollout_function_path"),
    "max_staleness": lambda v: (1, "asynchronous") if v["asynchronous"] else (0, "nothing runs ahead"),
    "use_tis": _use_tis,
    "fully_async": lambda v: (False, "rollout-function-path"),
    "max_groups_ahead": _groups_ahead,
}
"""By attribute, in an order in which each finds its sources ready."""


def derive(values: Values, origins: dict[str, str]) -> list[str]:
    """Fills ``values`` and ``origins`` in place; returns warnings."""
    _read_fully_async(values, origins)
    warnings = list(_ignored_rollout_slots(values, origins))
    for name, rule in DERIVATIONS.items():
        if name in origins:
            continue
        result = rule(values)
        if result is not None:
            values[name] = result[0]
            origins[name] = f"derived: {result[1]}"
    return warnings


def _read_fully_async(values: Values, origins: dict[str, str]) -> None:
    """The path that it has elsewhere stands for the flag: it is no function that takes the place of the sampler."""
    path = values["rollout_function_path"]
    if path is None or path.replace(":", ".") != FULLY_ASYNC:
        return
    values["rollout_function_path"] = None
    origins["rollout_function_path"] = f"derived: {path} is --fully-async"
    if "fully_async" not in origins:
        values["fully_async"] = True
        origins["fully_async"] = "derived: rollout-function-path"


def _without_engines(values: Values) -> str | None:
    """The flag that makes a run do without, if one does."""
    if values["loss_type"] == "sft_loss":
        return "--loss-type sft_loss"
    return "--load-debug-rollout-data" if values["load_debug_rollout_data"] is not None else None


def _ignored_rollout_slots(values: Values, origins: dict[str, str]) -> list[str]:
    given = values["rollout_num_gpus"]
    slots = values["actor_num_nodes"] * values["actor_num_gpus_per_node"]
    without_engines = _without_engines(values)
    if not (values["colocate"] or without_engines) or "rollout_num_gpus" not in origins:
        return []
    del origins["rollout_num_gpus"]
    if without_engines:
        return [f"--rollout-num-gpus {given} is ignored by {without_engines}: no engine is started"]
    if given == slots:
        return []
    return [f"--rollout-num-gpus {given} is ignored under --colocate: the engines use the {slots} training slots"]
