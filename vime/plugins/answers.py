"""What custom functions of the rollout return, read the same way in a run and in a trial.

Each reader raises WrongAnswer, whose message goes on after the name of the function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vime.config.eval_names import problems
from vime.observe.metrics import ROW_KEYS
from vime.plugins.contract import WrongAnswer, shown
from vime.plugins.filled import read_metadata, read_values
from vime.types import Group, InvalidSample, Sample, Status

if TYPE_CHECKING:
    import numpy as np

EvalData = Mapping[str, Mapping[str, Any]]
"""Name of the set → {"rewards": …, "by_prompt": …, "truncated": …, "samples": …}."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a sample keeps, whatever a function makes of it."""

    index: int | None
    group_index: int | None
    label: str | None

    @classmethod
    def of(cls, sample: Sample) -> Identity:
        return cls(sample.index, sample.group_index, sample.label)


def generated_samples(answer: Any, given: Identity, *, vocab_size: int | None = None) -> list[Sample]:
    """What a generate function made of one sample: the sample, or several, which become its children.

    Args:
        given: the sample that it got.
        vocab_size: of the model; None: not known.
    """
    if not isinstance(answer, list):
        return [generated_sample(answer, given, vocab_size=vocab_size)]
    if not answer:
        raise WrongAnswer("returned an empty list: at least one sample must become of the one that it got")
    children = [generated_sample(each, given, vocab_size=vocab_size) for each in answer]
    if len({id(child) for child in children}) < len(children):
        raise WrongAnswer("returned the same Sample twice in one list; each must be a copy of its own")
    if len(children) > 1:
        assert given.index is not None, "what is drawn has an index"
        for number, child in enumerate(children):
            child.adopt(given.index, number)
    return children


def generated_sample(answer: Any, given: Identity | None = None, *, vocab_size: int | None = None) -> Sample:
    """The sample that a generate function filled.

    Args:
        given: the sample that it got; None: not known.
    """
    if not isinstance(answer, Sample):
        raise WrongAnswer(f"must return the Sample or a list of Samples, not {shown(answer)}")
    if given is not None:
        _check_identity(answer, given)
    if answer.status is Status.PENDING:
        raise WrongAnswer("must set sample.status to Sample.Status.COMPLETED, TRUNCATED, ABORTED or FAILED")
    read_values(answer, vocab_size)
    if answer.ended_well and answer.response_length:
        try:
            answer.validate()
        except InvalidSample as error:
            raise WrongAnswer(f"returned a sample that breaks a rule: {error}") from None
        if answer.response_length == len(answer.tokens):
            raise WrongAnswer("returned a sample without prompt: sample.tokens are prompt and response together")
    return answer


def _check_identity(sample: Sample, given: Identity) -> None:
    found = Identity.of(sample)
    if (found.index, found.group_index) != (given.index, given.group_index):
        raise WrongAnswer(
            f"must keep index {given.index} and group_index {given.group_index}, "
            f"not {found.index} and {found.group_index}"
        )
    if found.label != given.label:
        raise WrongAnswer(
            f"must not change sample.label from {shown(given.label)} to {shown(found.label)}: it is what graders read"
        )


def rewards_pair(answer: Any, count: int) -> tuple[list[float], list[float]]:
    """(raw rewards, rewards to train on) of ``count`` samples."""
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise WrongAnswer(f"must return two lists, (raw rewards, rewards), not {shown(answer)}")
    raw, rewards = (numbers(values, name) for values, name in zip(answer, ("raw rewards", "rewards"), strict=True))
    if not len(raw) == len(rewards) == count:
        raise WrongAnswer(f"returned {len(raw)} raw rewards and {len(rewards)} rewards for {count} samples")
    return raw, rewards


def groups_and_metrics(
    answer: Any, *, generated: bool = True, multiple: int | None = None, vocab_size: int | None = None
) -> tuple[list[Group], dict[str, float]]:
    """What a rollout function made: groups, or an object that has them as ``samples`` (and ``metrics``).

    Args:
        generated: whether the samples must have responses already.
        multiple: --global-batch-size, where every drawn sample is one of a step.
    """
    groups = getattr(answer, "samples", answer)
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise WrongAnswer(f"must return a list of groups, each a list of samples, not {shown(answer)}")
    for sample in (sample for group in groups for sample in group):
        if not isinstance(sample, Sample):
            raise WrongAnswer(f"returned a group that holds {shown(sample)} instead of a Sample")
        if generated:
            generated_sample(sample, vocab_size=vocab_size)
        if sample.index is None or sample.group_index is None:
            raise WrongAnswer("returned a sample without index or group_index; those of the data source must be kept")
    indices = [sample.index for group in groups for sample in group]
    if len(set(indices)) != len(indices):
        raise WrongAnswer("returned two samples with the same index")
    _check_groups(groups)
    drawn = len({sample.origin for group in groups for sample in group})
    if multiple is not None and (not drawn or drawn % multiple):
        raise WrongAnswer(f"returned {drawn} samples, which are no multiple of --global-batch-size {multiple}")
    return groups, metrics_of(getattr(answer, "metrics", None))


def _check_groups(groups: Sequence[Group]) -> None:
    """Groups are told apart by their index: two with one index would share a baseline."""
    seen: set[int] = set()
    for number, group in enumerate(groups):
        found = {index for sample in group if (index := sample.group_index) is not None}
        if len(found) > 1:
            raise WrongAnswer(f"returned a group whose samples differ in group_index: {sorted(found)}")
        if found & seen:
            raise WrongAnswer(
                f"returned two groups with the group_index {min(found)}, the second in place {number}; each group must "
                "have one of its own, unique in the run"
            )
        seen |= found


def eval_data_and_metrics(answer: Any) -> tuple[EvalData, dict[str, float]]:
    """What an evaluation found: a dict of data sets, or an object that has it as ``data`` (and ``metrics``)."""
    data = getattr(answer, "data", answer)
    if not isinstance(data, Mapping):
        raise WrongAnswer(f"must return a dict of data sets, not {shown(data)}")
    for name, entry in data.items():
        if not isinstance(entry, Mapping) or "rewards" not in entry:
            raise WrongAnswer(f"returned no rewards for {name!r}: a data set is a dict with the key rewards")
        numbers(entry["rewards"], f"rewards of {name!r}")
        for place, sample in enumerate(entry.get("samples") or []):
            if not isinstance(sample, Sample):
                raise WrongAnswer(f"gave {shown(sample)} as samples[{place}] of {name!r}, which must be a Sample")
        for place, rewards in enumerate(_prompts(entry.get("by_prompt", []), name)):
            numbers(rewards, f"by_prompt[{place}] of {name!r}")
    for name in data:
        if not isinstance(name, str):
            raise WrongAnswer(f"must name every data set by a text, not {shown(name)}")
    for problem in problems(list(data)):
        raise WrongAnswer(f"named a data set as it cannot be: {problem}")
    return data, metrics_of(getattr(answer, "metrics", None))


def _prompts(answer: Any, name: str) -> Sequence[Any]:
    if not isinstance(answer, list | tuple):
        raise WrongAnswer(f"must give by_prompt of {name!r} as a list of lists of rewards, not {shown(answer)}")
    return answer


def metrics_of(answer: Any) -> dict[str, float]:
    """Metrics by name; None is none."""
    if answer is None:
        return {}
    if not isinstance(answer, Mapping):
        raise WrongAnswer(f"must give metrics as a dict of numbers, not {shown(answer)}")
    check_metric_names(answer)
    return {str(name): _number(value, f"metric {name!r}") for name, value in answer.items()}


def check_metric_names(metrics: Mapping[Any, Any]) -> None:
    """Raises WrongAnswer where a metric would take the place of what every row of metrics.jsonl has."""
    for name in ROW_KEYS & metrics.keys():
        raise WrongAnswer(f"must not name a metric {name}, as what every row of metrics.jsonl has; name it otherwise")


def logged(answer: Any, metrics: Mapping[str, float]) -> bool:
    """Whether a function for logging has logged ``metrics`` by itself; it may have added some."""
    check_metric_names(metrics)
    return bool(answer)


def hooked_sample(answer: Any, sample: Sample, given: Identity, *, vocab_size: int | None = None) -> Sample:
    """What a sample hook made of a sample; None: what it did in place.

    Args:
        given: what the sample was.
    """
    return generated_sample(sample if answer is None else answer, given, vocab_size=vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Whether a group counts."""

    keep: bool
    reason: str = ""  # of a drop; drops are counted by it
    keep_when_insufficient: bool = False  # whether it may fill the batch after all, when too few are kept


def kept_group(answer: Any) -> Kept:
    """What a dynamic sampling filter says: a bool, or an object with ``keep`` and perhaps the other fields of Kept."""
    import numpy as np  # the contracts are read where flags are explained, which has no use for it

    keep = getattr(answer, "keep", answer)
    if not isinstance(keep, bool | np.bool_):
        raise WrongAnswer(f"must return True or False, or an object with keep, not {shown(answer)}")
    return Kept(
        keep=bool(keep),
        reason=str(getattr(answer, "reason", "") or ""),
        keep_when_insufficient=bool(getattr(answer, "keep_when_insufficient", False)),
    )


def taken_groups(answer: Any, buffer: Sequence[Group], before: Sequence[Group], wanted: int) -> list[Group]:
    """The groups that a buffer filter took out of the buffer.

    Args:
        buffer, before: what is left in it, and what was in it.
    """
    if not isinstance(answer, list):
        raise WrongAnswer(f"must return a list of groups, not {shown(answer)}")
    if len(answer) > wanted:
        raise WrongAnswer(f"returned {len(answer)} groups where {wanted} were wanted")
    taken, left = {id(group) for group in answer}, {id(group) for group in buffer}
    if taken - {id(group) for group in before}:
        raise WrongAnswer("returned a group that was not in the buffer")
    if taken & left:
        raise WrongAnswer("must remove the groups that it returns from the buffer")
    return answer


def new_groups(answer: Any, wanted: int, size: int | None = None) -> list[Group]:
    """At most ``wanted`` groups of samples from a data source.

    Args:
        size: --n-samples-per-prompt, where every sample is one of a step.
    """
    if not isinstance(answer, list) or not all(isinstance(group, list) and group for group in answer):
        raise WrongAnswer(f"must return a list of groups, each a list of samples, not {shown(answer)}")
    if len(answer) > wanted:
        raise WrongAnswer(f"returned {len(answer)} groups where {wanted} were wanted")
    for group in answer:
        for sample in group:
            if not isinstance(sample, Sample):
                raise WrongAnswer(f"returned a group that holds {shown(sample)} instead of a Sample")
            if sample.index is None or sample.group_index is None:
                raise WrongAnswer("must give every sample an index, and every group a group_index, unique in the run")
            read_metadata(sample)
        if size is not None and len(group) != size:
            raise WrongAnswer(f"returned a group of {len(group)} samples, it must have --n-samples-per-prompt {size}")
    _check_groups(answer)
    return answer


def whole_length(answer: Any) -> int:
    """How many prompts a data source says that it has."""
    if not isinstance(answer, int) or isinstance(answer, bool) or answer < 0:
        raise WrongAnswer(f"must say its length as a whole number, not {answer!r}")
    return answer


def numbers(values: Any, name: str, length: int | None = None) -> list[float]:
    """Finite numbers, ``length`` of them if that is given."""
    import numpy as np

    if isinstance(values, str | Mapping) or not hasattr(values, "__iter__"):
        raise WrongAnswer(f"must give {name} as a list of numbers, not {shown(values)}")
    array = _array(values)
    read: list[float] = (
        array.astype(float).tolist()
        if array is not None and np.isfinite(array).all()
        else [_number(value, f"{name}[{place}]") for place, value in enumerate(values)]  # to tell which one is wrong
    )
    if length is not None and len(read) != length:
        raise WrongAnswer(f"gave {len(read)} values as {name}, which must have {length}")
    return read


def _array(values: Any) -> np.ndarray[Any, Any] | None:
    """Plain numbers as an array, without a look at each."""
    import numpy as np

    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):
        return None
    return array if array.dtype.kind in "biuf" and array.ndim == 1 else None


def _number(value: Any, name: str) -> float:
    """A number of Python, NumPy or a tensor of one element."""
    try:
        if isinstance(value, str | None):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise WrongAnswer(f"gave {shown(value)} as {name}, which must be a number") from None
    if not math.isfinite(number):
        raise WrongAnswer(f"gave {number} as {name}, which must be finite")
    return number


def check_sequence(answer: Any, count: int, what: str) -> Sequence[Any]:
    """A list of ``count`` items."""
    if not isinstance(answer, list | tuple) or len(answer) != count:
        number = f"{len(answer)} of them" if isinstance(answer, list | tuple) else shown(answer)
        raise WrongAnswer(f"must return a list of {count} {what}, not {number}")
    return answer
