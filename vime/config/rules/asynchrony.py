"""What training and generation at the same time need, and what they exclude."""

from __future__ import annotations

from collections.abc import Iterator

from vime.config.config import Config
from vime.config.rules.base import Violation, is_given, known, where_sampled


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


def continuous(config: Config) -> Iterator[Violation]:
    asynchrony = config.asynchrony
    if not asynchrony.fully_async:
        if is_given(config, "max_groups_ahead"):
            yield Violation("--max-groups-ahead needs --fully-async", ("fully_async",))
        return
    if not asynchrony.asynchronous:
        yield Violation("--fully-async needs train_async.py: train.py samples and trains in turn")
    elif asynchrony.max_staleness == 0:
        yield Violation("--fully-async with --max-staleness 0: nothing may run ahead; give at least 1, better 2")
    if config.hooks.rollout_function_path is not None:
        yield Violation("--fully-async and --rollout-function-path exclude each other: both say how rollouts are made")
    if is_given(config, "over_sampling_batch_size"):
        yield Violation(
            "--over-sampling-batch-size has no effect with --fully-async: --max-groups-ahead says how many are in "
            "flight"
        )


def in_order(config: Config) -> Iterator[Violation]:
    most = config.asynchrony.max_staleness
    if config.asynchrony.runs_ahead and config.sampling.deterministic_rollout:
        yield Violation(
            f"--deterministic-rollout and --max-staleness {most} exclude each other: which weights sample a token "
            "depends on when it is sampled; --max-staleness 0 repeats"
        )


def nothing_dropped(config: Config) -> Iterator[Violation]:
    if config.asynchrony.staleness_policy == "drop" and config.hooks.rollout_function_path is not None:
        yield Violation(
            "--staleness-policy drop has no effect beside --rollout-function-path, which takes the place of what "
            "drops: use mask or wait"
        )


def runs_on(config: Config) -> Iterator[Violation]:
    sampling = config.sampling
    if config.asynchrony.runs_ahead and sampling.partial_rollout:
        also = " and --mask-offpolicy-in-partial-rollout have" if sampling.mask_offpolicy_in_partial_rollout else " has"
        yield Violation(
            f"--partial-rollout{also} no effect in train_async.py with --max-staleness above 0: nothing is "
            "interrupted, groups run on into the next rollout"
        )


def nothing_waits(config: Config) -> Iterator[Violation]:
    asynchrony = config.asynchrony
    if asynchrony.runs_ahead and asynchrony.staleness_policy != "drop" and config.hooks.buffer_filter_path is not None:
        yield Violation(
            "--buffer-filter-path has next to no effect in train_async.py with --max-staleness above 0: groups run on "
            "into the next rollout, and only --staleness-policy drop gives some back"
        )


@where_sampled
def never_stale(config: Config) -> Iterator[Violation]:
    """What train.py samples for a rollout has the newest weights; older is only what an earlier rollout left."""
    asynchrony, sampling = config.asynchrony, config.sampling
    if asynchrony.asynchronous or not known(asynchrony.max_staleness):
        return
    policy, most = asynchrony.staleness_policy, asynchrony.max_staleness
    if policy == "wait" and most > 0:
        yield Violation(
            f"--max-staleness {most} bounds nothing in train.py with --staleness-policy wait: only --use-tis follows "
            "from it; give --staleness-policy drop or mask, or use train_async.py"
        )
    drawn, wanted = sampling.over_sampling_batch_size, config.rollout.rollout_batch_size
    leaves = config.hooks.dynamic_sampling_filter_path is not None or sampling.use_fault_tolerance
    if policy != "wait" and config.hooks.rollout_function_path is None and drawn == wanted and not leaves:
        yield Violation(
            f"--staleness-policy {policy} has no effect in train.py without --over-sampling-batch-size above "
            "--rollout-batch-size or a dynamic sampling filter: no rollout leaves anything to the next one"
        )


def nobody_overtakes(config: Config) -> Iterator[Violation]:
    asynchrony = config.asynchrony
    most, batch = asynchrony.max_staleness, config.rollout.rollout_batch_size
    if not asynchrony.fully_async or asynchrony.staleness_policy != "wait" or not known(most, batch):
        return
    if most == 1:
        yield Violation(
            "--fully-async with --max-staleness 1 and --staleness-policy wait: every group is due in the very next "
            "rollout, so none can overtake another; --max-staleness 2 lets them"
        )
    places = (most + 1) * batch
    if known(asynchrony.max_groups_ahead) and asynchrony.max_groups_ahead > places:
        yield Violation(
            f"--max-groups-ahead {asynchrony.max_groups_ahead}: --max-staleness {most} lets no more than {places} "
            "start with --staleness-policy wait"
        )


def one_old_actor(config: Config) -> Iterator[Violation]:
    if config.off_policy.keep_old_actor and (config.asynchrony.runs_ahead or config.sampling.partial_rollout):
        yield Violation(
            "--keep-old-actor takes the newest weights that sampled a token of the rollout, for all of its tokens: "
            "those that are staler have an old policy that did not sample them; --use-rollout-logprobs has each "
            "token's own"
        )


RULES = (own_devices, samples_answers, interval, continuous, in_order, nothing_dropped)
WARNINGS = (
    *(never_ahead, uncorrected, runs_on, nothing_waits, never_stale),
    *(nobody_overtakes, one_old_actor),
)
