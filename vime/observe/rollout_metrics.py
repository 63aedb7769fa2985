"""Metrics of one rollout, computed from its groups. Pure functions; names and units in ``metrics``."""

from __future__ import annotations

import itertools
import statistics
import zlib
from collections import Counter
from collections.abc import Callable, Sequence

from vime.algorithms.rewards import zero_std_counts
from vime.metadata import multi_turn_of
from vime.observe import scores
from vime.rewards.values import answer_rewards, is_graded
from vime.types import GradeStatus, Group, Sample, Status, WeightVersion, mean

__all__ = ["multi_turn_metrics", "pass_rates", "repeats_itself", "rollout_metrics"]

Score = Callable[[Sample], float]
"""The reward of a graded sample as one number."""


def rollout_metrics(
    groups: Sequence[Group],
    seconds: float,
    *,
    score: Score,
    engine_slots: int = 1,
    staleness_of: Callable[[WeightVersion], int] | None = None,
) -> dict[str, float]:
    """All metrics of a rollout. What cannot be said of it (no sample, no version) is left out, never NaN.

    Args:
        groups: the kept groups, graded.
        seconds: how long generation and grading took.
        score: reads the reward of a graded sample.
        engine_slots: GPUs of all engines together, or CPU slots where there are none.
        staleness_of: version → trainings between its weights and the one that uses the samples; None where unknown.
    """
    samples = list(itertools.chain.from_iterable(groups))
    if not samples:
        return {"perf/rollout_time": seconds}
    return (
        _lengths(samples)
        | _outcomes(samples)
        | _rewards(groups, score)
        | _versions(samples, staleness_of)
        | _speed(samples, seconds, engine_slots)
    )


def _lengths(samples: Sequence[Sample]) -> dict[str, float]:
    lengths = [sample.response_length for sample in samples]
    return {
        "rollout/response_len/mean": mean(lengths),
        "rollout/response_len/median": float(statistics.median(lengths)),
        "rollout/response_len/max": float(max(lengths)),
        "rollout/response_len/min": float(min(lengths)),
    }


def _outcomes(samples: Sequence[Sample]) -> dict[str, float]:
    statuses = [sample.status for sample in samples]
    return {
        "rollout/truncated_ratio": statuses.count(Status.TRUNCATED) / len(samples),
        "rollout/aborted": float(statuses.count(Status.ABORTED)),
        "rollout/failed": float(statuses.count(Status.FAILED)),
        "rollout/repetition_frac": mean([float(repeats_itself(sample.response)) for sample in samples]),
    }


def _rewards(groups: Sequence[Group], score: Score) -> dict[str, float]:
    samples = [(number, sample) for number, group in enumerate(groups) for sample in group]
    grades = [sample.grade.status for _, sample in samples if sample.grade is not None]
    counts = {
        "rollout/reward_errors": float(grades.count(GradeStatus.ERROR)),
        "rollout/invalid_answers": float(grades.count(GradeStatus.INVALID)),
    }
    graded = [(number, score(sample)) for number, sample in samples if is_graded(sample, score)]
    if not graded:
        return counts
    numbers, rewards = zip(*graded, strict=True)
    zero_std = zero_std_counts(rewards, numbers)
    answers = [reward for group in groups for reward in answer_rewards(group, score)]
    return (
        counts
        | {"rollout/raw_reward": mean(answers)}
        | {f"rollout/zero_std/count_{reward}": float(count) for reward, count in zero_std.items()}
        | {"rollout/zero_std/ratio": sum(zero_std.values()) / len(set(numbers))}
    )


def _versions(samples: Sequence[Sample], staleness_of: Callable[[WeightVersion], int] | None) -> dict[str, float]:
    counts = Counter(itertools.chain.from_iterable(sample.weight_versions for sample in samples))
    if not counts:
        return {}
    metrics = {
        "rollout/weight_version/min": float(min(counts)),
        "rollout/weight_version/max": float(max(counts)),
        "rollout/mixed_version_ratio": mean([float(len(set(sample.weight_versions)) > 1) for sample in samples]),
    }
    if staleness_of is not None:
        trained = Counter(itertools.chain.from_iterable(sample.trained_versions for sample in samples))
        ages = {version: staleness_of(version) for version in trained}
        metrics["rollout/staleness/mean"] = sum(ages[v] * n for v, n in trained.items()) / max(trained.total(), 1)
        metrics["rollout/staleness/max"] = float(max(ages.values(), default=0))
    return metrics


def _speed(samples: Sequence[Sample], seconds: float, engine_slots: int) -> dict[str, float]:
    if seconds <= 0:
        return {"perf/rollout_time": 0.0}
    lengths = [sample.response_length for sample in samples]
    return {
        "perf/rollout_time": seconds,
        "perf/tokens_per_gpu_per_sec": sum(lengths) / seconds / engine_slots,
        "perf/longest_sample_tokens_per_sec": max(lengths) / seconds,
    }


def multi_turn_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """``rollout/multi_turn/...`` (--log-multi-turn) of the samples that ``vime.rollout.multi_turn`` made, if any."""
    records = [(sample, multi_turn_of(sample.metadata)) for sample in samples]
    played = [(sample, known) for sample, known in records if "turns" in known]
    if not played:
        return {}
    turns = [len(known["turns"]) for _, known in played]
    said = sum(stop - start for _, known in played for start, stop in known["turns"])
    metrics = {
        "turns/mean": mean(turns),
        "turns/max": float(max(turns)),
        "sampled_ratio": said / max(1, sum(sample.response_length for sample, _ in played)),
    }
    called = [known for _, known in played if "tool_calls" in known]
    if called:
        calls = sum(known["tool_calls"] for known in called)
        metrics |= {
            "tool_calls/mean": calls / len(called),
            "tool_error_ratio": sum(known.get("tool_errors", 0) for known in called) / max(1, calls),
            "tool_timeouts": float(sum(known.get("tool_timeouts", 0) for known in called)),
            "tool_seconds/mean": sum(known.get("tool_seconds", 0) for known in called) / len(called),
        }
    return {f"rollout/multi_turn/{name}": value for name, value in metrics.items()}


REPETITION_TAIL = 4096
"""Characters at the end of a response that are looked at."""

REPETITION_RATIO = 10.0
"""Prose and code compress 2 to 4 times; a text that compresses 10 times says the same thing again and again."""


def repeats_itself(response: str) -> bool:
    """Whether the end of a response is a repetition, told by how well it compresses. Below 256 bytes: never."""
    tail = response[-REPETITION_TAIL:].encode()
    return len(tail) >= 256 and len(tail) / len(zlib.compress(tail)) > REPETITION_RATIO


def pass_rates(groups: Sequence[Group], score: Score) -> dict[str, float]:
    """``rollout/passrate/pass@k`` for k = 1, 2, 4 … up to the largest group (--log-passrate); see ``scores``."""
    rates = scores.pass_rates([answer_rewards(group, score) for group in groups])
    return {f"rollout/passrate/pass@{k}": scores.average(rate) for k, rate in rates.items()}
