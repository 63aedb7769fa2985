"""What training and generation at the same time need, and what they exclude."""

from __future__ import annotations

from collections.abc import Iterator

from vime.config.config import Config
from vime.config.rules.base import Violation, known


def own_devices(config: Config) -> Iterator[Violation]:
    if not config.asynchrony.asynchronous:
        return
    cluster = config.cluster
    sharing = "--colocate" if cluster.colocate else "--offload-rollout" if cluster.offload_rollout else None
    if sharing is not None:
        yield Violation(
            f"{sharing} and train_async.py exclude each other: engines that sleep while the trainer computes cannot "
            "sample at the same time; give them slots of their own by --rollout-num-gpus, or use train.py"
        )


def samples_answers(config: Config) -> Iterator[Violation]:
    if not config.asynchrony.asynchronous:
        return
    if config.algorithm.is_sft:
        yield Violation("--loss-type sft_loss samples nothing that could run ahead of training: use train.py")
    elif config.ops.debug_train_only or config.ops.debug_rollout_only:
        given = "--debug-train-only" if config.ops.debug_train_only else "--debug-rollout-only"
        yield Violation(f"{given} leaves train_async.py nothing to do at the same time: use train.py")


def interval(config: Config) -> Iterator[Violation]:
    """Before a sync is due, as many trainings have passed as an interval has, less one."""
    asynchrony = config.asynchrony
    every, most = asynchrony.update_weights_interval, asynchrony.max_staleness
    if every > 1 and not asynchrony.asynchronous:
        yield Violation(
            f"--update-weights-interval {every} needs train_async.py: train.py samples with the newest weights"
        )
    elif known(most) and every - 1 > most:
        yield Violation(
            f"--update-weights-interval {every} makes samples {every - 1} trainings stale and --max-staleness {most} "
            f"allows {most}: nothing could be trained before the next sync",
            ("max_staleness", "update_weights_interval"),
        )


def never_ahead(config: Config) -> Iterator[Violation]:
    """Rollout k + 1, sampled while k is trained on, is one training stale, and more where a sync was left out."""
    asynchrony = config.asynchrony
    every, most = asynchrony.update_weights_interval, asynchrony.max_staleness
    if asynchrony.asynchronous and known(most) and most < every:
        yield Violation(
            f"--max-staleness {most} with --update-weights-interval {every}: "
            + ("no rollout" if every == 1 else f"only {every - 1} of {every} rollouts")
            + f" can be sampled while another is trained on; --max-staleness {every} lets all"
        )


def uncorrected(config: Config) -> Iterator[Violation]:
    off_policy, most = config.off_policy, config.asynchrony.max_staleness
    derived = config.origins.get("use_tis", "").startswith("derived")
    if derived and not off_policy.use_tis and known(most) and most > 0 and config.algorithm.loss_type == "policy_loss":
        why = "--use-rollout-logprobs" if off_policy.use_rollout_logprobs else "--rollout-top-p or --rollout-top-k"
        yield Violation(
            f"--max-staleness {most} without --use-tis, which {why} excludes: stale tokens weigh as new ones"
        )


RULES = (own_devices, samples_answers, interval)
WARNINGS = (never_ahead, uncorrected)
