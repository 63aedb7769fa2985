"""Flags that were given and that nothing reads, as the other flags are: a warning for each reason, never silence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vime.config.config import OWN_FLAGS, Config
from vime.config.eval_datasets import eval_datasets
from vime.config.rules.base import Violation, is_given, option
from vime.config.rules.sft import is_idle
from vime.errors import UserError


@dataclass(frozen=True, slots=True)
class Idle:
    """Flags that only count under a condition."""

    names: tuple[str, ...]
    counts: Callable[[Config], bool]
    why: str  # completes "has no effect …"


def _graded_by(grader: str) -> Callable[[Config], bool]:
    """Whether flags or evaluation sets name that built-in grader, or a custom function has taken its place."""

    def counts(config: Config) -> bool:
        return _replaced(config) or any(name.removeprefix("boxed_") == grader for name in _graders(config))

    return counts


def _graders(config: Config) -> set[str]:
    """The built-in graders that the run is known to use; where --eval-config is wrong, another rule says so."""
    alone = config.reward.rm_type if config.hooks.custom_rm_path is None else None
    try:
        sets = eval_datasets(config)
    except UserError:
        sets = ()
    return {name for name in (alone, *(each.grader for each in sets)) if name is not None}


def _replaced(config: Config) -> bool:
    """Whether a custom function grades every answer."""
    return config.hooks.custom_rm_path is not None and not _graders(config)


def _renders(config: Config) -> bool:
    """Whether anything may render messages by the chat template."""
    data, hooks = config.data, config.hooks
    custom = hooks.custom_generate_function_path or hooks.rollout_function_path or hooks.eval_function_path
    measured = data.rollout_max_prompt_len is not None or config.evaluation.eval_max_prompt_len is not None
    return data.apply_chat_template or config.algorithm.is_sft or measured or custom is not None


def _decays(config: Config) -> bool:
    return config.optimizer.lr_decay_style != "constant"


def _warms_up(config: Config) -> bool:
    return bool(config.optimizer.lr_warmup_iters or config.optimizer.lr_warmup_fraction)


def _starting(prefix: str) -> tuple[str, ...]:
    return tuple(name for name in OWN_FLAGS if name.startswith(prefix))


IDLE = (
    Idle(
        ("max_tokens_per_gpu",), lambda config: config.batch.use_dynamic_batch_size, "without --use-dynamic-batch-size"
    ),
    Idle(
        ("micro_batch_size",),
        lambda config: not config.batch.use_dynamic_batch_size,
        "with --use-dynamic-batch-size: --max-tokens-per-gpu says how much is packed",
    ),
    Idle(_starting("wandb_"), lambda config: config.ops.use_wandb, "without --use-wandb"),
    Idle(
        _starting("rollout_health_check_"),
        lambda config: config.sampling.use_fault_tolerance,
        "without --use-fault-tolerance",
    ),
    Idle(
        ("rm_type", "rm_url", "rm_code_score", "rm_code_sandbox"),
        lambda config: not _replaced(config),
        "with --custom-rm-path, which grades every answer, unless that function reads it",
    ),
    Idle(("rm_url",), _graded_by("remote_rm"), "unless rows name the grader remote_rm: no flag does"),
    Idle(("rm_code_score", "rm_code_sandbox"), _graded_by("code"), "unless rows name the grader code: no flag does"),
    Idle(("kl_loss_type",), lambda config: config.algorithm.needs_reference, "without --use-kl-loss or --kl-coef"),
    Idle(("min_lr",), _decays, "with --lr-decay-style constant"),
    Idle(
        ("lr_decay_iters",),
        lambda config: _decays(config) or config.optimizer.lr_warmup_fraction is not None,
        "with --lr-decay-style constant",
    ),
    Idle(("lr_warmup_init",), _warms_up, "without --lr-warmup-iters or --lr-warmup-fraction"),
    Idle(
        ("mtp_loss_scaling_factor",),
        lambda config: config.algorithm.enable_mtp_training,
        "without --enable-mtp-training",
    ),
    Idle(("loss_mask_type",), lambda config: config.algorithm.is_sft, "without --loss-type sft_loss"),
    Idle(("apply_chat_template_kwargs",), _renders, "without --apply-chat-template"),
    Idle(
        ("eval_interval", "save_debug_rollout_data"),
        lambda config: config.has_engines or config.algorithm.is_sft,
        "with --load-debug-rollout-data: nothing is sampled",
    ),
    Idle(
        ("no_save_optim", "ckpt_format"),
        lambda config: bool(config.checkpoint.save or config.critic.critic_save),
        "without --save",
    ),
)


def never_read(config: Config) -> Iterator[Violation]:
    for each in IDLE:
        given = [name for name in each.names if is_given(config, name) and not _said_elsewhere(config, name)]
        if given and not each.counts(config):
            yield Violation(_line(given, each.why))


def _said_elsewhere(config: Config, name: str) -> bool:
    """Fine-tuning has one line for all that is for sampling and grading."""
    return config.algorithm.is_sft and is_idle(name)


def another_router(config: Config) -> Iterator[Violation]:
    given = [f"router_{name}" for name in config.router]
    if given and config.engine.vllm_router_ip is not None and config.has_engines:
        yield Violation(_line(given, "with --vllm-router-ip: that router runs already"))


def _line(names: list[str], why: str) -> str:
    return f"{', '.join(map(option, names))} {'has' if len(names) == 1 else 'have'} no effect {why}"


WARNINGS = (never_read, another_router)
