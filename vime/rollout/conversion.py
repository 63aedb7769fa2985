"""From closed groups to the trainer's batch."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from vime.algorithms.rewards import has_signal
from vime.errors import UserError
from vime.naming import rollout_name
from vime.rewards.values import Score, is_graded, is_not_finite
from vime.types import Group, InvalidSample, RolloutBatch, Sample, Status, TokenScores, TrainSample

PostProcess = Callable[[list[Sample]], tuple[Sequence[float], Sequence[float]]]
"""Samples → (raw rewards, rewards to train on), equally long."""

Convert = Callable[[int, Sequence[Group], PostProcess], RolloutBatch]
"""rollout_id, closed groups, post-processing → the batch; ``to_rollout_batch`` with its options."""

PLACE = [0, 0]
"""Prompt and response of a sample that has neither: the token that every vocabulary has."""

OWN_INDEX = "the data source must give every {} one of its own, unique in the run"

logger = logging.getLogger(__name__)


def to_rollout_batch(
    rollout_id: int,
    groups: Sequence[Group],
    post_process: PostProcess,
    *,
    score: Score = Sample.score,
    needs_log_probs: str | None = None,
    exclude_zero_signal: bool = False,
) -> RolloutBatch:
    """Validates and freezes the samples of one rollout, ordered by index, children in the place of their parent.

    A sample whose grader failed has no reward: it takes no part in its group's baseline and its mask is zero, but it
    keeps its place in the batch and so in the denominator. The same holds for a sample that failed or was aborted, for
    one with an empty response, and for one whose reward is not a finite number, which is named and counted.
    Log-probs of the engine are kept only where every sample that is trained has them; the others have zeros then.

    Args:
        score: reads a reward.
        needs_log_probs: the flag that cannot do without log-probs of the engine.
        exclude_zero_signal: whether groups whose processed rewards are all equal count in no denominator.

    Raises:
        UserError: not one sample has a reward.
        InvalidSample: a sample breaks a rule that training relies on, or is to be trained and has no log-probs where
            they are needed.
    """
    samples = in_order(groups)
    graded = [sample for sample in samples if is_graded(sample, score)]
    if not graded:
        raise UserError(f"{rollout_name(rollout_id)}: no sample has a reward; the first: {_why_ungraded(samples)}")
    broken = [sample for sample in samples if sample.ended_well and is_not_finite(sample, score)]
    processed = dict(zip(map(index_of, graded), zip(*_checked(post_process, graded), strict=True), strict=True))
    rewards = {index: pair for index, pair in processed.items() if all(map(math.isfinite, pair))}
    broken += [sample for sample in graded if index_of(sample) not in rewards]
    for sample in broken:
        logger.warning("%s: its reward is not a finite number; it is not trained on", sample.name)
    frozen = _with_silent_teacher([_freeze(sample, rewards.get(index_of(sample))) for sample in samples])
    if exclude_zero_signal:
        frozen = _without_zero_signal(frozen, rewards)
    frozen = _with_engine_log_probs(frozen, samples, needs_log_probs)
    metrics = {"rollout/nonfinite_rewards": float(len(broken))}
    return RolloutBatch(rollout_id=rollout_id, samples=tuple(frozen), metrics=metrics)


def _without_zero_signal(
    samples: Sequence[TrainSample], rewards: Mapping[int, tuple[float, float]]
) -> list[TrainSample]:
    """The samples of groups without a signal count nowhere; only graded ones say whether there is one."""
    by_group: defaultdict[int, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.index in rewards:
            by_group[sample.group_index].append(sample.reward)
    signal = {group for group, processed in by_group.items() if has_signal(processed)}
    return [
        sample
        if sample.group_index in signal
        else dataclasses.replace(sample, loss_mask=(0,) * sample.response_length, counts=False)
        for sample in samples
    ]


def _with_engine_log_probs(
    frozen: Sequence[TrainSample], samples: Sequence[Sample], needed_by: str | None
) -> list[TrainSample]:
    """With log-probs of the engine in every sample or in none: metrics are the same for all micro-batches of a step.

    Where trained samples have them, those that are not trained need none, but a place for them.
    """
    known = any(_known(sample) for sample in frozen)
    missing = [sample for sample, one in zip(samples, frozen, strict=True) if one.trained_tokens and not _known(one)]
    if missing and needed_by is not None:
        raise InvalidSample(
            f"{missing[0].name}: it has no rollout_log_probs, and {needed_by} needs them of every sample that is "
            "trained; the generate function must keep those of the engine"
        )
    if missing and known:
        logger.warning("%s has no rollout_log_probs: those of the whole rollout are left out", missing[0].name)
    if missing or not (known or needed_by):
        return [dataclasses.replace(sample, rollout_log_probs=None) for sample in frozen]
    return [
        sample if _known(sample) else dataclasses.replace(sample, rollout_log_probs=(0.0,) * sample.response_length)
        for sample in frozen
    ]


def _known(sample: TrainSample) -> bool:
    return sample.rollout_log_probs is not None


def index_of(sample: Sample) -> int:
    """The key by which the samples of a rollout are ordered.

    Raises:
        InvalidSample: it was lost on the way.
    """
    if sample.index is None:
        raise InvalidSample("a sample came back without its index; generate functions must keep it")
    return sample.index


def in_order(groups: Sequence[Group]) -> list[Sample]:
    """All samples by index, children in the place of their parent.

    Raises:
        InvalidSample: an index was lost on the way; two samples have the same, and would share a reward, or two groups,
            and would share a baseline.
    """
    samples = sorted(itertools.chain.from_iterable(groups), key=lambda sample: (sample.origin, index_of(sample)))
    for one, other in itertools.pairwise(samples):
        if one.index == other.index:
            raise InvalidSample(f"two samples have the index {one.index}; {OWN_INDEX.format('sample')}")
    first_of: dict[int, Sample] = {}
    for sample in (group[0] for group in groups if group):
        number = sample.group_index
        other = sample if number is None else first_of.setdefault(number, sample)
        if other is not sample:
            raise InvalidSample(
                f"two groups have the group_index {number}, that of sample {other.index} and that of sample "
                f"{sample.index}; {OWN_INDEX.format('group')}"
            )
    return samples


def _why_ungraded(samples: Sequence[Sample]) -> str:
    first = samples[0]
    detail = first.grade.detail if first.grade is not None else "it was never graded; set --rm-type or --custom-rm-path"
    return detail if first.name in detail else f"{first.name}: {detail}"


def _checked(post_process: PostProcess, samples: list[Sample]) -> tuple[Sequence[float], Sequence[float]]:
    raw, rewards = post_process(samples)
    if not len(raw) == len(rewards) == len(samples):
        raise UserError(
            f"the reward post-processing returned {len(raw)} raw and {len(rewards)} processed rewards "
            f"for {len(samples)} samples"
        )
    return raw, rewards


def _placeholder(sample: Sample) -> Sample:
    """Keeps the place of a sample that failed or has no response: its last token stands in for the response, masked."""
    return dataclasses.replace(
        sample,
        status=Status.COMPLETED,
        tokens=sample.tokens if len(sample.tokens) >= 2 else PLACE,
        response_length=1,
        loss_mask=[0],
        rollout_log_probs=None,
        teacher_log_probs=None,
        weight_versions=[],
        rollout_routed_experts=None,
    )


def _freeze(sample: Sample, rewards: tuple[float, float] | None) -> TrainSample:
    """``rewards``: (raw, processed), or None for a sample without one."""
    if sample.response_length == 0 or not sample.ended_well:
        sample = _placeholder(sample)
    sample.validate()
    raw, reward = rewards if rewards is not None else (0.0, 0.0)
    trained = rewards is not None and not sample.remove_sample
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    return TrainSample(
        index=index_of(sample),
        group_index=sample.group_index if sample.group_index is not None else index_of(sample),
        tokens=tuple(sample.tokens),
        response_length=sample.response_length,
        loss_mask=tuple(mask) if trained else (0,) * sample.response_length,
        rollout_log_probs=tuple(sample.rollout_log_probs) if sample.rollout_log_probs is not None else None,
        weight_versions=tuple(sample.weight_versions),
        raw_reward=raw,
        reward=reward,
        parent_index=sample.parent_index,
        graded=rewards is not None,
        truncated=sample.truncated,
        metadata=sample.train_metadata,
        routed_experts=sample.rollout_routed_experts,
        scores=TokenScores(teacher_log_probs=tuple(sample.teacher_log_probs) if sample.teacher_log_probs else None),
    )


def _with_silent_teacher(samples: list[TrainSample]) -> list[TrainSample]:
    """Where a teacher has judged the samples, those that are not trained need no judgement, but a place for one."""
    if all(sample.scores.teacher_log_probs is None for sample in samples):
        return samples
    return [
        sample
        if sample.trained_tokens or sample.scores.teacher_log_probs is not None
        else dataclasses.replace(sample, scores=TokenScores(teacher_log_probs=(0.0,) * sample.response_length))
        for sample in samples
    ]
