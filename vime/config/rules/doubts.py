"""Warnings: what is allowed but seldom meant."""

from __future__ import annotations

from collections.abc import Iterator

from vime.config.config import OWN_FLAGS, Config
from vime.config.foreign.megatron_lm import WITHOUT_EFFECT
from vime.config.rules.base import Violation, is_given, known, option

OF_EVALUATION = (
    *(name for name, flag in OWN_FLAGS.items() if flag.section == "evaluation"),
    *("eval_function_path", "eval_reward_key"),
)


def single_sample(config: Config) -> Iterator[Violation]:
    alone, algorithm = config.rollout.n_samples_per_prompt == 1 and config.has_engines, config.algorithm
    if (
        alone
        and not config.distillation.use_opd
        and algorithm.estimator.group_relative
        and not algorithm.disable_rewards_normalization
    ):
        yield Violation(
            "--n-samples-per-prompt 1 makes every advantage 0: a group of one is its own baseline; 8 is usual with "
            f"{algorithm.advantage_estimator}"
        )


def weights_have_no_dual_clip(config: Config) -> Iterator[Violation]:
    if config.algorithm.advantage_estimator == "cispo" and config.algorithm.eps_clip_c is not None:
        yield Violation("--eps-clip-c has no effect with cispo: --eps-clip-high bounds what a token weighs")


def policy_has_not_moved(config: Config) -> Iterator[Violation]:
    off_policy = config.off_policy
    elsewhere = off_policy.use_rollout_logprobs or off_policy.keep_old_actor
    if off_policy.use_opsm and config.batch.num_steps_per_rollout == 1 and not elsewhere:
        yield Violation(
            "--use-opsm has no effect with one step a rollout: the old policy is the current one; it needs "
            "--use-rollout-logprobs, --keep-old-actor or --num-steps-per-rollout above 1"
        )


def truncated_sampling(config: Config) -> Iterator[Violation]:
    rollout = config.rollout
    if not config.has_engines:
        return
    for name, value, free in (
        ("rollout_top_p", rollout.rollout_top_p, 1),
        ("rollout_top_k", rollout.rollout_top_k, -1),
    ):
        if value != free:
            yield Violation(
                f"{option(name)} {value}: the engine samples from fewer tokens than the trainer computes log-probs "
                f"over; {free} is right for training (evaluations are free)"
            )


def reference_only_watched(config: Config) -> Iterator[Violation]:
    if config.algorithm.needs_reference and config.algorithm.use_kl_loss and config.algorithm.kl_loss_coef == 0:
        yield Violation(
            "--use-kl-loss with --kl-loss-coef 0 only reports the KL divergence, at the cost of the reference model's "
            "memory and one more forward pass; leave --use-kl-loss out to save both"
        )


def evaluation_never_runs(config: Config) -> Iterator[Violation]:
    given = [option(name) for name in OF_EVALUATION if is_given(config, name)]
    if given and config.evaluation.eval_interval is None:
        yield Violation(f"{', '.join(given)} without --eval-interval: no evaluation will run")


def both_lengths(config: Config) -> Iterator[Violation]:
    if config.rollout.num_rollout is not None and config.rollout.num_epoch is not None:
        yield Violation(f"--num-epoch {config.rollout.num_epoch} is ignored: --num-rollout wins")


def packs_hold_a_sample(config: Config) -> Iterator[Violation]:
    """Of answers alone: prompts come on top."""
    packed, response = config.batch.max_tokens_per_gpu, config.rollout.rollout_max_response_len
    if not (config.batch.use_dynamic_batch_size and config.has_engines and known(packed, response)):
        return
    assert packed is not None
    room = packed * config.parallel.context_parallel_size
    if room < response:
        yield Violation(
            f"--max-tokens-per-gpu {packed} holds less than a response of --rollout-max-response-len {response}: "
            "longer samples are passed one by one, and take the memory that they need"
        )


def without_effect(config: Config) -> Iterator[Violation]:
    for name, reason in WITHOUT_EFFECT.items():
        if name in config.megatron:
            yield Violation(f"{option(name)} has no effect: {reason}")


def router_balance(config: Config) -> Iterator[Violation]:
    """Measured with vllm-router 0.1.17: docs/en/advanced/engines.md."""
    policy = config.router.get("policy", "consistent_hash")
    for name in ("balance_abs_threshold", "balance_rel_threshold", "cache_threshold"):
        if name in config.router and policy != "cache_aware":
            yield Violation(
                f"{option(f'router_{name}')} has no effect with --router-policy {policy}: only cache_aware reads it"
            )


def balanced_packs(config: Config) -> Iterator[Violation]:
    coef = config.megatron.get("moe_aux_loss_coeff")
    if coef and config.batch.use_dynamic_batch_size:
        yield Violation(
            f"--moe-aux-loss-coeff {coef} balances the experts of each micro-batch: with --use-dynamic-batch-size its "
            "loss depends on what is packed together, and so on the parallel layout"
        )


def colocated_nodes(config: Config) -> Iterator[Violation]:
    """No rule: the nodes of flags may lie on one of the cluster, and CPUs that take turns share no device."""
    nodes, transport = config.cluster.actor_num_nodes, config.engine.update_weight_transport
    if config.has_engines and config.cluster.colocate and known(nodes) and nodes > 1 and transport != "disk":
        yield Violation(
            f"--colocate with --actor-num-nodes {nodes}: where they are several nodes with GPUs, the run ends once it "
            "has its slots, unless --update-weight-transport disk brings the weights to the engines"
        )


def never_saved(config: Config) -> Iterator[Violation]:
    if config.checkpoint.save is None and not (config.ops.debug_rollout_only or config.ops.debug_train_only):
        yield Violation("without --save nothing of the trained model is kept")


def sequence_parallel_advised(config: Config) -> Iterator[Violation]:
    if config.parallel.tensor_model_parallel_size > 1 and not config.parallel.sequence_parallel:
        yield Violation("--sequence-parallel saves memory with --tensor-model-parallel-size above 1")


WARNINGS = (
    single_sample,
    weights_have_no_dual_clip,
    policy_has_not_moved,
    truncated_sampling,
    reference_only_watched,
    evaluation_never_runs,
    both_lengths,
    packs_hold_a_sample,
    without_effect,
    router_balance,
    balanced_packs,
    colocated_nodes,
    never_saved,
    sequence_parallel_advised,
)
