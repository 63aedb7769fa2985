"""From the dict of lists that a custom conversion returns to the trainer's samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vime.plugins.answers import numbers
from vime.plugins.contract import WrongAnswer, shown
from vime.rewards.values import Score, is_graded
from vime.types import Sample, TrainSample

REQUIRED = ("tokens", "response_lengths", "rewards")
OPTIONAL = (
    "loss_masks",
    "raw_reward",
    "truncated",
    "sample_indices",
    "group_indices",
    "rollout_log_probs",
    "weight_versions",
    "metadata",
)


def train_rows(answer: Any, samples: Sequence[Sample], score: Score = Sample.score) -> list[TrainSample]:
    """One TrainSample a row.

    Args:
        answer: a dict of lists: all of ``REQUIRED``, any of ``OPTIONAL``, all of one length. What is left out is as the
            samples have it, if there is a row for each of them: indices, ``truncated``, ``train_metadata``, and where
            the response is the sample's too its loss mask, log-probs and versions. A sample that was removed or has no
            reward is not trained on then. Else a missing loss mask is all ones; a missing raw reward is the reward.
        score: reads the reward of a sample.

    Raises:
        WrongAnswer: a key, a length or a value is wrong.
    """
    columns = _columns(answer)
    count = len(columns["tokens"])
    if count != len(samples) and "sample_indices" not in columns:
        raise WrongAnswer(f"returned {count} rows for {len(samples)} samples; then it must give sample_indices too")
    columns = _of_samples(samples if count == len(samples) else [], columns, score) | columns
    columns["rewards"] = numbers(columns["rewards"], "rewards")
    columns["raw_reward"] = numbers(columns.get("raw_reward", columns["rewards"]), "raw_reward")
    rows = _with_log_probs([_row({name: values[i] for name, values in columns.items()}, i) for i in range(count)])
    if len({row.index for row in rows}) != count:
        raise WrongAnswer("gave two rows the same sample index")
    return rows


def _with_log_probs(rows: list[TrainSample]) -> list[TrainSample]:
    """Rows that are not trained need no log-probs of the engine, but a place for them where others have some."""
    if all(row.rollout_log_probs is None for row in rows):
        return rows
    if any(row.rollout_log_probs is None and row.trained_tokens for row in rows):
        raise WrongAnswer("gave rollout_log_probs to some rows and not to others")
    return [
        replace(row, rollout_log_probs=(0.0,) * row.response_length) if row.rollout_log_probs is None else row
        for row in rows
    ]


def _columns(answer: Any) -> dict[str, Any]:
    if not isinstance(answer, Mapping):
        raise WrongAnswer(f"must return a dict of lists, not {shown(answer)}")
    missing = [name for name in REQUIRED if name not in answer]
    if missing:
        raise WrongAnswer(f"left out {', '.join(missing)}: a rollout needs {', '.join(REQUIRED)}")
    for name, values in answer.items():
        if name not in REQUIRED + OPTIONAL:
            raise WrongAnswer(f"returned {name!r}, which nobody reads; there are {', '.join(REQUIRED + OPTIONAL)}")
        if not hasattr(values, "__len__") or not hasattr(values, "__getitem__"):
            raise WrongAnswer(f"must return a list as {name}, not {shown(values)}")
        if len(values) != len(answer["tokens"]):
            raise WrongAnswer(f"returned {len(answer['tokens'])} tokens and {len(values)} {name}: one a row")
    return dict(answer)


def _of_samples(samples: Sequence[Sample], given: Mapping[str, Any], score: Score) -> dict[str, Any]:
    """What samples say of rows that do not say it. Masks, log-probs and versions only of a response that is theirs."""
    if not samples:
        return {}
    rows = zip(given["tokens"], given["response_lengths"], samples, strict=True)
    own = [_has_response_of(sample, tokens, length) for tokens, length, sample in rows]
    graded = [is_graded(sample, score) for sample in samples]
    masks = [
        _mask(sample, is_own, has_reward and not sample.remove_sample, int(length))
        for sample, is_own, has_reward, length in zip(samples, own, graded, given["response_lengths"], strict=True)
    ]
    columns: dict[str, Any] = {
        "sample_indices": [sample.index for sample in samples],
        "group_indices": [sample.group_index for sample in samples],
        "truncated": [sample.truncated for sample in samples],
        "metadata": [sample.train_metadata for sample in samples],
        "graded": graded,
        "loss_masks": masks,
    }
    used = [any(_integers(mask, f"loss_masks[{i}]")) for i, mask in enumerate(given.get("loss_masks", masks))]
    known = [is_own and sample.rollout_log_probs is not None for is_own, sample in zip(own, samples, strict=True)]
    if not any(trained and not has for trained, has in zip(used, known, strict=True)):
        columns["rollout_log_probs"] = [
            s.rollout_log_probs if has else None for s, has in zip(samples, known, strict=True)
        ]
    columns["weight_versions"] = [s.weight_versions if is_own else [] for s, is_own in zip(samples, own, strict=True)]
    return columns


def _has_response_of(sample: Sample, tokens: Any, length: Any) -> bool:
    count = int(length)
    if not 0 < count == sample.response_length:
        return False
    return _integers(tokens, "tokens")[-count:] == tuple(sample.tokens[-count:])


def _mask(sample: Sample, is_own: bool, trained: bool, length: int) -> list[int]:
    if not trained:
        return [0] * length
    return sample.loss_mask if is_own and sample.loss_mask is not None else [1] * length


def _row(row: Mapping[str, Any], place: int) -> TrainSample:
    tokens, length = _integers(row["tokens"], f"tokens[{place}]"), int(row["response_lengths"])
    if not 0 < length < len(tokens):
        raise WrongAnswer(
            f"gave response_lengths[{place}] = {length} for {len(tokens)} tokens; prompt and response need one each"
        )
    mask = _integers(row.get("loss_masks", [1] * length), f"loss_masks[{place}]", length)
    if not set(mask) <= {0, 1}:
        raise WrongAnswer(f"gave loss_masks[{place}] values other than 0 and 1")
    log_probs = row.get("rollout_log_probs")
    if log_probs is not None:
        log_probs = tuple(numbers(log_probs, f"rollout_log_probs[{place}]", length))
    versions = _integers(row.get("weight_versions") or [], f"weight_versions[{place}]")
    index = int(row["sample_indices"])
    group = row.get("group_indices")
    return TrainSample(
        index=index,
        group_index=index if group is None else int(group),
        tokens=tokens,
        response_length=length,
        loss_mask=mask,
        rollout_log_probs=log_probs,
        weight_versions=versions,
        raw_reward=row["raw_reward"],
        reward=row["rewards"],
        graded=row.get("graded", True),
        truncated=bool(row.get("truncated", False)),
        metadata=row.get("metadata"),
    )


def _integers(values: Any, name: str, length: int | None = None) -> tuple[int, ...]:
    read = numbers(values, name, length)
    if any(value != int(value) for value in read):
        raise WrongAnswer(f"gave {name} values that are not whole numbers")
    return tuple(map(int, read))
