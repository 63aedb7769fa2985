"""The metric names of vime with their units, and the guard that keeps non-finite numbers out of files and curves.

Names are a contract with users' dashboards: a name is added, never reused for something else. Users' hooks may log
further names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["METRICS", "ROW_KEYS", "Metric", "describe", "split_finite"]

ROW_KEYS = frozenset({"rollout_id", "step", "nonfinite"})
"""What a row of metrics.jsonl has beside metrics, none of which may have such a name."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, or a family of them where the name holds ``{placeholders}``."""

    name: str
    unit: str  # empty: a plain number
    description: str

    @property
    def pattern(self) -> re.Pattern[str]:
        """What the names of the family look like."""
        return re.compile(re.sub(r"\\\{\w+\\\}", "(.+)", re.escape(self.name)))


def _family(prefix: str, rows: Iterable[tuple[str, str, str]]) -> list[Metric]:
    return [Metric(f"{prefix}/{name}", unit, description) for name, unit, description in rows]


_ROLLOUT = _family(
    "rollout",
    [
        ("response_len/mean", "tokens", "Mean length of the responses."),
        ("response_len/median", "tokens", "Median length of the responses."),
        ("response_len/max", "tokens", "Longest response."),
        ("response_len/min", "tokens", "Shortest response."),
        ("total_len/mean", "tokens", "Mean length of the samples of fine-tuning, with their context."),
        ("total_len/max", "tokens", "Longest such sample."),
        ("trained_tokens", "tokens", "Tokens of the rollout that fine-tuning trains."),
        ("truncated_ratio", "share", "Samples that ran into the length limit."),
        ("aborted", "samples", "Samples that were interrupted."),
        ("failed", "samples", "Samples that the engine or a hook failed on."),
        ("raw_reward", "", "Mean reward before any normalisation, of the answers that have one."),
        ("reward_errors", "samples", "Samples without a reward because the grader failed or ran out of time."),
        ("nonfinite_rewards", "samples", "Samples left out because their reward is not a finite number."),
        ("routed_tokens", "share", "Tokens that training sends to the experts of the engines; others route freely."),
        ("invalid_answers", "samples", "Graded samples whose response holds no answer to grade."),
        ("zero_std/count_{reward}", "groups", "Groups whose samples all got this reward, so they teach nothing."),
        ("zero_std/ratio", "share", "Groups whose samples all got the same reward."),
        ("groups/drawn", "groups", "Groups that were started, those that waited from earlier rollouts among them."),
        ("groups/trained", "groups", "Groups that the rollout is made of."),
        ("groups/dropped", "groups", "Finished groups that did not count."),
        ("groups/dropped/{reason}", "groups", "Those of one reason, which a filter gave."),
        ("groups/returned", "groups", "Surplus groups that wait for a later rollout."),
        ("groups/in_flight", "groups", "Groups that run on while the rollout is trained on."),
        ("samples/continued", "samples", "Interrupted answers that were gone on with."),
        ("samples/requeued", "samples", "Times that an answer was begun again because its engine failed."),
        ("samples/given_up", "samples", "Answers that failed with --max-sample-requeues engines."),
        ("engine_restarts", "engines", "Engines restarted since the rollout before, with --use-fault-tolerance."),
        ("router_restarts", "times", "Restarts of the router since the rollout before, with --use-fault-tolerance."),
        ("requests_repeated", "requests", "Requests sent again since then, because an engine or the router failed."),
        ("repetition_frac", "share", "Responses that end in a repetition."),
        ("passrate/pass@{k}", "share", "Chance that one of k answers to a prompt is right (unbiased estimate)."),
        ("multi_turn/turns/mean", "turns", "Turns of the model in a sample, on average."),
        ("multi_turn/turns/max", "turns", "The most turns of a sample."),
        ("multi_turn/sampled_ratio", "share", "Response tokens that the model said itself, not its environment."),
        ("multi_turn/tool_calls/mean", "calls", "Tool calls of a sample, on average, those that cannot be read too."),
        ("multi_turn/tool_error_ratio", "share", "Of these, calls that gave an error."),
        ("multi_turn/tool_timeouts", "calls", "Tool calls that ran out of time."),
        ("multi_turn/tool_seconds/mean", "s", "Time that a sample waited for tools, on average."),
        ("weight_version/min", "", "Oldest weights that sampled a token."),
        ("weight_version/max", "", "Newest weights that sampled a token."),
        ("mixed_version_ratio", "share", "Samples whose tokens come from more than one version of the weights."),
        (
            "staleness/mean",
            "trainings",
            "Trainings between the weights that sampled a trained token and its own; mean.",
        ),
        ("staleness/max", "trainings", "The largest such lag."),
        ("staleness/dropped_ratio", "share", "Finished groups that came too late and went back as fresh prompts."),
        ("staleness/dropped_length_ratio", "", "Mean length of their responses by that of the responses in time."),
        ("staleness/masked_ratio", "share", "Tokens that are not trained because they are too stale."),
        ("log_probs", "nats", "Mean log-probability of the trained tokens before the update."),
        ("rollout_log_probs", "nats", "The same as the engine computed it while sampling."),
        ("ref_log_probs", "nats", "The same under the reference model."),
        ("advantages", "", "Mean advantage of the trained tokens."),
        ("values", "", "Mean value of the trained tokens, by the critic before the update."),
        ("returns", "", "Mean of what the critic learns: value and advantage before any whitening."),
        ("explained_variance", "share", "How much of what returns differ in the critic knew: 1 all, 0 the mean alone."),
    ],
)

_PERF = _family(
    "perf",
    [
        ("rollout_time", "s", "Wall time of the generation of the rollout, grading included."),
        ("tokens_per_gpu_per_sec", "tokens/s", "Response tokens by generation time and engine slot."),
        ("longest_sample_tokens_per_sec", "tokens/s", "Tokens of the longest response by generation time."),
        ("update_weights_time", "s", "Wall time of the weight sync."),
        ("actor_{phase}_time", "s", "Wall time of a phase of the trainer: train, log_probs and others."),
        ("actor_train_tokens_per_s", "tokens/s", "Tokens that were trained on, prompts included, by training time."),
        ("actor_train_tflops", "TFLOP/s", "Floating-point operations of the actor's training by time and device."),
        ("critic_{phase}_time", "s", "Wall time of a phase of the critic."),
        ("critic_train_tokens_per_s", "tokens/s", "The same as for the actor."),
        ("step_time", "s", "Wall time of the whole step: rollout, training and sync."),
        (
            "sync_time/{step}",
            "s",
            "Wall time of a step of the weight sync: export in the trainer, the others in all engines.",
        ),
        ("turn_time/{what}", "s", "Wall time of a part of the change of turns under --colocate."),
        ("phase_time/{phase}", "s", "Wall time of the step during which this phase was running."),
        ("overhead_share", "share", "Part of the step spent outside generation, rewards, training and sync."),
    ],
)

_TRAIN = _family(
    "train",
    [
        ("loss", "", "The loss that was minimized."),
        ("pg_loss", "", "Its policy-gradient part."),
        ("entropy_loss", "nats", "Mean entropy of the policy at the trained tokens."),
        ("pg_clipfrac", "share", "Trained tokens at which a clip decided the loss."),
        ("ppo_kl", "nats", "Mean of log π_old - log π: how far the policy moved since the rollout."),
        ("opd_kl", "nats", "Mean of log π_old - log π_teacher: how far the policy is from the teacher (reverse KL)."),
        ("kl_loss", "nats", "Estimate of the KL divergence from the reference model, before its coefficient."),
        ("log_ratio_clamped", "share", "Trained tokens whose log-ratio left the range of ±20."),
        ("grad_norm", "", "Norm of the gradient before clipping."),
        ("mtp_loss", "nats", "Mean -log q of the layer for multi-token prediction, trained beside the policy."),
        ("mtp_grad_norm", "", "Norm of that layer's gradient before clipping, which the policy's leaves out."),
        (
            "nonfinite_samples",
            "samples",
            "Samples left out: an advantage or importance weight is not finite.",
        ),
        ("skipped_steps", "steps", "Optimizer steps left out because the gradient was not finite."),
        ("lr", "", "Learning rate."),
        ("critic_loss", "", "The critic's loss: mean of the clipped squared error of its values."),
        ("critic_clipfrac", "share", "Trained tokens at which --value-clip decided the critic's loss."),
        ("critic_grad_norm", "", "Norm of the critic's gradient before clipping."),
        ("critic_lr", "", "The critic's learning rate."),
        ("critic_skipped_steps", "steps", "The critic's steps left out because the gradient was not finite."),
        ("train_rollout_logprob_abs_diff", "nats", "Mean |log π_train - log π_rollout| at the trained tokens."),
        ("train_rollout_logprob_abs_diff_max", "nats", "The largest such difference."),
        ("ois", "", "Mean ratio of the policy to the one before the update."),
        ("mismatch_kl", "nats", "Mean of log π_rollout - log π_train: KL of the engine from the trainer (k1)."),
        ("mismatch_k3_kl", "nats", "The same by the estimator k3, which is never negative."),
        ("tis", "", "Mean importance weight π_train / π_rollout within its bounds; it weighs the loss with --use-tis."),
        ("tis_abs", "", "Mean |w - 1| of the weights before any bound."),
        ("tis_clipfrac", "share", "Trained tokens whose importance weight was not within the bounds."),
        ("tis_vetofrac", "share", "Trained tokens of samples that --tis-veto leaves out."),
        ("opsm_maskfrac", "share", "Trained tokens that --use-opsm leaves out."),
    ],
)

_EVAL = _family(
    "eval",
    [
        ("weight_version/min", "", "Oldest weights that sampled a token of the evaluation."),
        ("weight_version/max", "", "Newest weights that sampled a token of the evaluation."),
        ("{name}-pass@{k}-ci95", "share", "Half of the 95 % confidence interval of pass@k."),
        ("{name}-pass@{k}", "share", "Chance that one of k answers to a prompt of the set is right (unbiased)."),
        ("{name}-ci95", "", "Half of the 95 % confidence interval of the mean reward, prompts as clusters."),
        ("{name}-truncated_ratio", "share", "Samples of the set that ran into the length limit."),
        ("{name}-response_len", "tokens", "Mean length of the responses to the set."),
        ("{name}-graded", "samples", "Answers to the set that have a reward."),
        ("{name}-errors", "samples", "Answers to the set that have none."),
        ("{name}-loss", "nats", "Mean of -log π over the trained tokens of given dialogues, weighed as in training."),
        (
            "{name}",
            "",
            "Mean reward on this evaluation set (avg@n for n answers a prompt).",
        ),  # last: it matches the others too
    ],
)

_MEMORY = _family(
    "memory",
    [
        ("actor/generate", "GiB", "What a rank of the actor holds while engines generate; the fullest rank."),
        ("{role}/parameters", "GiB", "Weights on the device of the fullest rank of actor or critic after training."),
        ("{role}/gradients", "GiB", "Gradients there."),
        ("{role}/optimizer", "GiB", "Main weights and moments there."),
        ("{role}/train_peak", "GiB", "Most that a rank held at once in training; on CPUs since its start."),
        (
            "engine/{phase}",
            "GiB",
            "What an engine's processes hold while training or generation goes on; without GPUs.",
        ),
        ("device/{phase}", "GiB", "What all processes together use on an engine's GPU in that phase; the fullest."),
    ],
)

METRICS: tuple[Metric, ...] = (*_ROLLOUT, *_PERF, *_TRAIN, *_MEMORY, *_EVAL)


def describe(name: str) -> Metric | None:
    """The metric or family that ``name`` belongs to; None for a name that is not vime's own."""
    return next((metric for metric in METRICS if metric.pattern.fullmatch(name)), None)


def split_finite(metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """The finite metrics as plain floats, and the names of the others, sorted.

    JSON has no NaN, and one NaN blanks a curve; but that there was one must be seen.
    """
    values = {name: float(value) for name, value in metrics.items()}
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    return finite, sorted(values.keys() - finite.keys())
