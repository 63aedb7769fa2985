"""From the dict of lists that a custom conversion returns to the trainer's samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vime.plugins.answers import numbers
from vime.plugins.contract import WrongAnswer, shown
from vime.plugins.filled import ROUNDING
from vime.rewards.values import Score, is_graded
from vime.types import RoutedExperts, Sample, TokenScores, TrainSample

REQUIRED = ("tokens", "response_lengths", "rewards")
PLACE = (0, 0)
"""Prompt and response of a row that has neither: the token that every vocabulary has."""

OPTIONAL = (
    "loss_masks",
    "raw_reward",
    "truncated",
    "sample_indices",
    "group_indices",
    "parent_indices",
    "rollout_log_probs",
    "teacher_log_probs",
    "weight_versions",
    "rollout_routed_experts",
    "metadata",
)


def train_rows(
    answer: Any, samples: Sequence[Sample], score: Score = Sample.score, *, vocab_size: int | None = None
) -> list[TrainSample]:
    """One TrainSample a row.

    Args:
        answer: a dict of lists: all of ``REQUIRED``, any of ``OPTIONAL``, all of one length. What is left out is as the
            samples have it, if there is a row for each of them: indices, ``truncated``, ``train_metadata``, where the
            response is the sample's too its loss mask, versions and log-probs (of engine and teacher), and where all
            tokens are, its routes. A sample that was removed or has no reward is not trained on then. Else a missing
            loss mask is all ones; a missing raw reward is the reward. A row may have no response: it keeps its place
            and is not trained on.
        score: reads the reward of a sample.
        vocab_size: of the model; None: not known.

    Raises:
        WrongAnswer: a key, a length or a value is wrong.
    """
    columns = _columns(answer)
    count = len(columns["tokens"])
    if count != len(samples) and "sample_indices" not in columns:
        raise WrongAnswer(f"returned {count} rows for {len(samples)} samples; then it must give sample_indices too")
    columns = _of_samples(samples if count == len(samples) else [], columns, score) | columns
    columns.setdefault("loss_masks", [[1] * int(length) for length in columns["response_lengths"]])
    _give_places(columns)
    columns["rewards"] = numbers(columns["rewards"], "rewards")
    columns["raw_reward"] = numbers(columns.get("raw_reward", columns["rewards"]), "raw_reward")
    _complete(columns, "rollout_log_probs")
    _complete(columns, "teacher_log_probs")
    rows = [_row({name: values[i] for name, values in columns.items()}, i) for i in range(count)]
    for place, row in enumerate(rows):
        _check_range(row, place, math.inf if vocab_size is None else vocab_size)
    if len({row.index for row in rows}) != count:
        raise WrongAnswer("gave two rows the same sample index")
    return rows


def _give_places(columns: dict[str, Any]) -> None:
    """A row without a response, as of a sample that failed, keeps its place: its last token stands in, not trained."""
    empty = [i for i, length in enumerate(columns["response_lengths"]) if int(length) == 0]
    if not empty:
        return
    stand_ins = {"response_lengths": 1, "loss_masks": [0], "weight_versions": []}
    stand_ins |= {"rollout_log_probs": None, "teacher_log_probs": None, "rollout_routed_experts": None}
    for name in ("tokens", *stand_ins.keys() & columns.keys()):
        columns[name] = list(columns[name])
    for i in empty:
        columns["tokens"][i] = columns["tokens"][i] if len(columns["tokens"][i]) > 1 else PLACE
        for name in stand_ins.keys() & columns.keys():
            columns[name][i] = stand_ins[name]


def _complete(columns: dict[str, Any], name: str) -> None:
    """Rows that are not trained need no log-probs, but a place for them where others have some."""
    rows = columns.get(name)
    if rows is None or all(row is None for row in rows):
        return
    if any(row is None and any(mask) for row, mask in zip(rows, columns["loss_masks"], strict=True)):
        raise WrongAnswer(f"gave {name} to some rows and not to others")
    lengths = map(int, columns["response_lengths"])
    columns[name] = [[0.0] * count if row is None else row for row, count in zip(rows, lengths, strict=True)]


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
        "parent_indices": [sample.parent_index for sample in samples],
        "truncated": [sample.truncated for sample in samples],
        "metadata": [sample.train_metadata for sample in samples],
        "graded": graded,
        "loss_masks": masks,
    }
    used = [any(_integers(mask, f"loss_masks[{i}]")) for i, mask in enumerate(given.get("loss_masks", masks))]
    for name in ("rollout_log_probs", "teacher_log_probs"):
        found = [getattr(sample, name) if is_own else None for sample, is_own in zip(samples, own, strict=True)]
        if not any(trained and row is None for trained, row in zip(used, found, strict=True)):
            columns[name] = found
    columns["rollout_routed_experts"] = [
        _routes_of(sample, tokens) for sample, tokens in zip(samples, given["tokens"], strict=True)
    ]
    columns["weight_versions"] = [s.weight_versions if is_own else [] for s, is_own in zip(samples, own, strict=True)]
    return columns


def _routes_of(sample: Sample, tokens: Any) -> RoutedExperts | None:
    """Those of the sample, where a row has all its tokens."""
    routes = sample.rollout_routed_experts
    return routes if routes is not None and _integers(tokens, "tokens") == tuple(sample.tokens) else None


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
    mask = _integers(row["loss_masks"], f"loss_masks[{place}]", length)
    if not set(mask) <= {0, 1}:
        raise WrongAnswer(f"gave loss_masks[{place}] values other than 0 and 1")
    versions = _integers(row.get("weight_versions") or [], f"weight_versions[{place}]")
    index = int(row["sample_indices"])
    group, parent = row.get("group_indices"), row.get("parent_indices")
    return TrainSample(
        index=index,
        group_index=index if group is None else int(group),
        tokens=tokens,
        response_length=length,
        loss_mask=mask,
        rollout_log_probs=_log_probs(row, "rollout_log_probs", place, length),
        weight_versions=versions,
        raw_reward=row["raw_reward"],
        reward=row["rewards"],
        parent_index=None if parent is None else int(parent),
        graded=row.get("graded", True),
        truncated=bool(row.get("truncated", False)),
        metadata=row.get("metadata"),
        routed_experts=row.get("rollout_routed_experts"),
        scores=TokenScores(teacher_log_probs=_log_probs(row, "teacher_log_probs", place, length)),
    )


def _check_range(row: TrainSample, place: int, vocab_size: float) -> None:
    if not 0 <= min(row.tokens) <= max(row.tokens) < vocab_size:
        at, token = next((i, t) for i, t in enumerate(row.tokens) if not 0 <= t < vocab_size)
        raise WrongAnswer(f"gave tokens[{place}][{at}] = {token}; a token id is from 0 to below {vocab_size}")
    for name, values in (
        ("rollout_log_probs", row.rollout_log_probs),
        ("teacher_log_probs", row.scores.teacher_log_probs),
    ):
        if values and max(values) > ROUNDING:
            at = values.index(max(values))
            raise WrongAnswer(f"gave {name}[{place}][{at}] = {values[at]:g}; a log-prob is at most 0")


def _log_probs(row: Mapping[str, Any], name: str, place: int, length: int) -> tuple[float, ...] | None:
    values = row.get(name)
    return None if values is None else tuple(numbers(values, f"{name}[{place}]", length))


def _integers(values: Any, name: str, length: int | None = None) -> tuple[int, ...]:
    read = numbers(values, name, length)
    if any(value != int(value) for value in read):
        raise WrongAnswer(f"gave {name} values that are not whole numbers")
    return tuple(map(int, read))
