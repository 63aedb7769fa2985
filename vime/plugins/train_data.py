"""From the dict of lists that a custom conversion returns to the trainer's samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vime.plugins.answers import numbers
from vime.plugins.contract import WrongAnswer, shown
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


def train_rows(answer: Any, samples: Sequence[Sample]) -> list[TrainSample]:
    """One TrainSample a row.

    Args:
        answer: a dict of lists: all of ``REQUIRED``, any of ``OPTIONAL``, all of one length. What is left out is as the
            samples have it, if there is a row for each of them: indices, log-probs, versions, ``truncated`` and
            ``train_metadata``; a missing loss mask is all ones, a missing raw reward the reward.

    Raises:
        WrongAnswer: a key, a length or a value is wrong.
    """
    columns = _columns(answer)
    count = len(columns["tokens"])
    if count != len(samples) and "sample_indices" not in columns:
        raise WrongAnswer(f"returned {count} rows for {len(samples)} samples; then it must give sample_indices too")
    columns = _of_samples(samples if count == len(samples) else [], columns) | columns
    columns["rewards"] = numbers(columns["rewards"], "rewards")
    columns["raw_reward"] = numbers(columns.get("raw_reward", columns["rewards"]), "raw_reward")
    rows = [_row({name: values[i] for name, values in columns.items()}, i) for i in range(count)]
    if len({row.index for row in rows}) != count:
        raise WrongAnswer("gave two rows the same sample index")
    if len({row.rollout_log_probs is None for row in rows}) > 1:
        raise WrongAnswer("gave rollout_log_probs to some rows and not to others")
    return rows


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


def _of_samples(samples: Sequence[Sample], given: Mapping[str, Any]) -> dict[str, Any]:
    """What samples say of rows that do not say it. Log-probs and versions only of a response that is the sample's."""
    if not samples:
        return {}
    same = [
        int(length) == sample.response_length for length, sample in zip(given["response_lengths"], samples, strict=True)
    ]
    columns: dict[str, Any] = {
        "sample_indices": [sample.index for sample in samples],
        "group_indices": [sample.group_index for sample in samples],
        "truncated": [sample.truncated for sample in samples],
        "metadata": [sample.train_metadata for sample in samples],
    }
    if all(same):
        columns["rollout_log_probs"] = [sample.rollout_log_probs for sample in samples]
        columns["weight_versions"] = [sample.weight_versions for sample in samples]
    return columns


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
        truncated=bool(row.get("truncated", False)),
        metadata=row.get("metadata"),
    )


def _integers(values: Any, name: str, length: int | None = None) -> tuple[int, ...]:
    read = numbers(values, name, length)
    if any(value != int(value) for value in read):
        raise WrongAnswer(f"gave {name} values that are not whole numbers")
    return tuple(map(int, read))
