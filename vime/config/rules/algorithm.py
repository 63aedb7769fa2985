"""What an estimator needs, and terms of the loss that exclude each other."""

from __future__ import annotations

from collections.abc import Iterator

from vime.algorithms import advantages
from vime.config.config import Config
from vime.config.rules.base import Violation, is_given, known, option

NEVER_CALLED = ("custom_tis_function_path", "custom_pg_loss_reducer_function_path")
"""Parts of the policy loss, which a custom loss takes the place of."""

OF_POLICY_LOSS = (
    *("eps_clip", "eps_clip_high", "eps_clip_c", "entropy_coef", "kl_loss_coef", "use_unbiased_kl"),
    *("use_dr_grpo", "dr_grpo_divisor", "use_tis", "tis_level", "tis_mode", "tis_clip", "tis_clip_low", "tis_veto"),
    *("tis_batch_normalize", "use_opsm", "opsm_delta"),
)


def one_kl(config: Config) -> Iterator[Violation]:
    algorithm = config.algorithm
    if algorithm.kl_coef and algorithm.kl_loss_coef:
        yield Violation(
            f"--kl-coef {algorithm.kl_coef:g} (in the reward) and --kl-loss-coef {algorithm.kl_loss_coef:g} "
            "(in the loss) exclude each other"
        )


def kl_in_the_reward(config: Config) -> Iterator[Violation]:
    algorithm = config.algorithm
    if algorithm.kl_coef and not algorithm.estimator.takes_kl:
        able = [name for name in advantages.names() if advantages.get(name).takes_kl]
        yield Violation(
            f"--kl-coef {algorithm.kl_coef:g} has no place in the rewards of {algorithm.advantage_estimator}: use "
            f"--use-kl-loss with --kl-loss-coef, or --advantage-estimator {', '.join(able)}",
            ("advantage_estimator",),
        )


def whitening(config: Config) -> Iterator[Violation]:
    algorithm = config.algorithm
    if algorithm.estimator.needs_whitening and not algorithm.normalize_advantages:
        yield Violation(
            f"--advantage-estimator {algorithm.advantage_estimator} needs --normalize-advantages: its advantages have "
            "no scale of their own",
            ("advantage_estimator",),
        )


def dr_grpo(config: Config) -> Iterator[Violation]:
    algorithm = config.algorithm
    if algorithm.use_dr_grpo and config.batch.calculate_per_token_loss:
        yield Violation("--use-dr-grpo and --calculate-per-token-loss exclude each other: each has its own denominator")
    if not algorithm.use_dr_grpo and is_given(config, "dr_grpo_divisor"):
        yield Violation("--dr-grpo-divisor needs --use-dr-grpo", ("use_dr_grpo",))


def overlong(config: Config) -> Iterator[Violation]:
    buffer, longest = config.algorithm.overlong_buffer_len, config.rollout.rollout_max_response_len
    if buffer is None and is_given(config, "overlong_penalty_factor"):
        yield Violation("--overlong-penalty-factor needs --overlong-buffer-len", ("overlong_buffer_len",))
    if buffer is not None and known(longest) and buffer > longest:
        yield Violation(
            f"--overlong-buffer-len {buffer} is more than --rollout-max-response-len {longest}",
            ("overlong_buffer_len", "rollout_max_response_len"),
        )
    if buffer is not None and config.hooks.custom_reward_post_process_path is not None:
        yield Violation("--overlong-buffer-len and --custom-reward-post-process-path exclude each other")


def zero_signal(config: Config) -> Iterator[Violation]:
    """Equal rewards mean advantages of 0 only where nothing but their difference counts."""
    algorithm = config.algorithm
    others = {
        "--disable-rewards-normalization": algorithm.disable_rewards_normalization,
        f"--kl-coef {algorithm.kl_coef:g}": algorithm.kl_coef != 0 and algorithm.estimator.group_relative,
        "--custom-advantage-function-path": config.hooks.custom_advantage_function_path is not None,
    }
    for given in (name for name, is_there in others.items() if is_there and algorithm.exclude_zero_signal_groups):
        yield Violation(
            f"--exclude-zero-signal-groups and {given} exclude each other: there is something to learn from groups of "
            "equal rewards too"
        )
    if algorithm.exclude_zero_signal_groups and not algorithm.estimator.group_relative:
        yield Violation(
            f"--exclude-zero-signal-groups has no meaning with {algorithm.advantage_estimator}: it learns from groups "
            "of equal rewards too",
            ("advantage_estimator",),
        )


def reference(config: Config) -> Iterator[Violation]:
    algorithm = config.algorithm
    if algorithm.ref_update_interval is not None and not algorithm.needs_reference:
        yield Violation("--ref-update-interval needs a reference model: give --use-kl-loss or --kl-coef")
    if algorithm.use_unbiased_kl and not algorithm.use_kl_loss:
        yield Violation("--use-unbiased-kl needs --use-kl-loss", ("use_kl_loss",))


def one_old_policy(config: Config) -> Iterator[Violation]:
    off_policy = config.off_policy
    if not off_policy.use_rollout_logprobs:
        return
    for name in ("use_tis", "keep_old_actor"):
        if getattr(off_policy, name):
            yield Violation(
                f"{option(name)} and --use-rollout-logprobs exclude each other: the engine's log-probs are the old ones"
            )


def importance_sampling(config: Config) -> Iterator[Violation]:
    off_policy = config.off_policy
    for name in ("tis_level", "tis_mode", "tis_clip", "tis_clip_low", "tis_veto", "tis_batch_normalize"):
        if is_given(config, name) and not off_policy.use_tis:
            yield Violation(f"{option(name)} needs --use-tis", ("use_tis",))
    if is_given(config, "opsm_delta") and not off_policy.use_opsm:
        yield Violation("--opsm-delta needs --use-opsm", ("use_opsm",))
    low, high = off_policy.tis_clip_low, off_policy.tis_clip
    if low > high:
        yield Violation(f"--tis-clip-low {low:g} is above --tis-clip {high:g}", ("tis_clip_low", "tis_clip"))
    if low > 0 and off_policy.tis_mode == "truncate":
        yield Violation(
            f"--tis-clip-low {low:g} has no meaning with --tis-mode truncate; clip cuts both ways", ("tis_mode",)
        )


def whole_distribution(config: Config) -> Iterator[Violation]:
    """The engine's log-probs are of what it samples from; the trainer's are of the whole vocabulary."""
    rollout, off_policy = config.rollout, config.off_policy
    for name in ("use_tis", "use_rollout_logprobs"):
        for narrow, value, free in (
            ("rollout_top_p", rollout.rollout_top_p, 1),
            ("rollout_top_k", rollout.rollout_top_k, -1),
        ):
            if getattr(off_policy, name) and value != free:
                yield Violation(
                    f"{option(name)} compares log-probs of trainer and engine, which {option(narrow)} {value} makes "
                    f"different things: {free} is needed",
                    (narrow,),
                )


def custom_parts(config: Config) -> Iterator[Violation]:
    algorithm, hooks = config.algorithm, config.hooks
    if hooks.custom_tis_function_path is not None and not config.off_policy.use_tis:
        yield Violation("--custom-tis-function-path needs --use-tis", ("use_tis",))
    if hooks.custom_tis_function_path is not None and config.off_policy.tis_batch_normalize:
        yield Violation("--custom-tis-function-path and --tis-batch-normalize exclude each other")
    if hooks.custom_pg_loss_reducer_function_path is not None and algorithm.use_dr_grpo:
        yield Violation("--custom-pg-loss-reducer-function-path and --use-dr-grpo exclude each other")
    custom = algorithm.loss_type == "custom_loss"
    if custom and hooks.custom_loss_function_path is None:
        yield Violation("--loss-type custom_loss needs --custom-loss-function-path", ("custom_loss_function_path",))
    for name in NEVER_CALLED if custom else ():
        if getattr(hooks, name) is not None:
            yield Violation(f"{option(name)} is never called with --loss-type custom_loss, which is the whole loss")
    idle = algorithm.disable_compute_advantages_and_returns and hooks.custom_advantage_function_path is None
    if custom and idle and algorithm.needs_critic:
        yield Violation(
            "--disable-compute-advantages-and-returns leaves the critic of --advantage-estimator "
            f"{algorithm.advantage_estimator} without a use: give another estimator"
        )
    if custom and algorithm.enable_mtp_training:
        yield Violation("--loss-type custom_loss and --enable-mtp-training exclude each other")
    if not custom and hooks.custom_loss_function_path is not None:
        yield Violation("--custom-loss-function-path needs --loss-type custom_loss", ("loss_type",))


def estimator_takes(config: Config) -> Iterator[Violation]:
    algorithm = config.algorithm
    if algorithm.is_sft or config.hooks.custom_advantage_function_path is not None:
        return
    idle = [
        option(name) for name in advantages.TAKEN if is_given(config, name) and name not in algorithm.estimator.takes
    ]
    if idle:
        yield Violation(f"{', '.join(idle)}: no effect with --advantage-estimator {algorithm.advantage_estimator}")


def custom_loss_alone(config: Config) -> Iterator[Violation]:
    """One line for all, as a function may read them."""
    if config.algorithm.loss_type != "custom_loss":
        return
    idle = [option(name) for name in OF_POLICY_LOSS if is_given(config, name)]
    if idle:
        yield Violation(
            "--loss-type custom_loss is the whole loss; without effect unless --custom-loss-function-path reads them "
            f"from args: {', '.join(idle)}"
        )


WARNINGS = (estimator_takes, custom_loss_alone)

RULES = (
    one_kl,
    kl_in_the_reward,
    whitening,
    dr_grpo,
    overlong,
    zero_signal,
    reference,
    one_old_policy,
    importance_sampling,
    whole_distribution,
    custom_parts,
)
