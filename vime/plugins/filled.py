"""The values of a sample that a custom function filled: checked where they enter, so that no token, log-prob or label
is trained on that cannot be one.

Each reader raises WrongAnswer, whose message goes on after the name of the function; it names the sample and the place.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vime.metadata import BadMetadata, checked
from vime.plugins.contract import WrongAnswer, shown
from vime.types import Sample, Status, as_float

if TYPE_CHECKING:
    import numpy as np

ROUNDING = 1e-3
"""How far above 0 a log-prob may be: log-softmax in low precision rounds."""

KINDS: Mapping[str, tuple[type, ...]] = {
    "prompt": (str, list),
    "response": (str,),
    "label": (str, type(None)),
    "status": (Status,),
    "train_metadata": (dict, type(None)),
}
"""Fields of a sample that a function may have set, with what they hold."""


def read_values(sample: Sample, vocab_size: int | None = None) -> None:
    """Checks types and ranges of what a function filled; arrays and numbers of NumPy become Python's.

    Args:
        vocab_size: of the model; None: not known.

    Raises:
        WrongAnswer: one is wrong.
    """
    for name, kinds in KINDS.items():
        value = getattr(sample, name)
        if not isinstance(value, kinds):
            wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise _wrong(sample, f"{name} is {shown(value)}, it must be {wanted}")
    read_metadata(sample)
    sample.response_length = _whole_number(sample, "response_length", sample.response_length)
    bound, known = (math.inf, "") if vocab_size is None else (vocab_size, f" below the {vocab_size} of the vocabulary")
    sample.tokens = _integers(sample, "tokens", sample.tokens, bound, f"a token id, a whole number from 0{known}")
    if sample.loss_mask is not None:
        sample.loss_mask = _integers(sample, "loss_mask", sample.loss_mask, 2, "0 or 1")
    versions = [] if sample.weight_versions is None else sample.weight_versions
    sample.weight_versions = _integers(sample, "weight_versions", versions, math.inf, "a whole number from 0")
    sample.rollout_log_probs = _log_probs(sample, "rollout_log_probs", sample.rollout_log_probs)
    sample.teacher_log_probs = _log_probs(sample, "teacher_log_probs", sample.teacher_log_probs)


def read_metadata(sample: Sample) -> None:
    """Raises WrongAnswer where the metadata of a sample is none."""
    try:
        sample.metadata = checked(sample.metadata)
    except BadMetadata as error:
        raise _wrong(sample, str(error)) from None


def _integers(sample: Sample, name: str, values: Any, bound: float, what: str) -> list[int]:
    array = _array(sample, name, values)
    if array is not None and array.dtype.kind in "iu" and (not array.size or 0 <= array.min() <= array.max() < bound):
        found: list[int] = array.tolist()
        return found

    def is_right(value: Any) -> bool:
        return isinstance(value, numbers.Integral) and 0 <= int(value) < bound

    _check_each(sample, name, values, what, is_right)
    return [int(value) for value in values]


def _log_probs(sample: Sample, name: str, values: Any) -> list[float] | None:
    if values is None:
        return None
    array = _array(sample, name, values)
    if array is not None and array.dtype.kind in "iuf" and (array <= ROUNDING).all() and (array > -math.inf).all():
        found: list[float] = array.astype(float).tolist()
        return found

    def is_right(value: Any) -> bool:
        return isinstance(value, numbers.Real) and -math.inf < as_float(value) <= ROUNDING

    _check_each(sample, name, values, "a log-prob, a finite number of at most 0", is_right)
    return [as_float(value) for value in values]


def _array(sample: Sample, name: str, values: Any) -> np.ndarray[Any, Any] | None:
    """Plain numbers as an array [n], without a look at each; None: they need one."""
    import numpy as np  # the contracts are read where flags are explained, which has no use for it

    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
        raise _wrong(sample, f"{name} is {shown(values)}, it must be a list of numbers")
    try:
        array = np.asarray(values if len(values) else np.empty(0, int))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return array if array.ndim == 1 else None


def _check_each(sample: Sample, name: str, values: Any, what: str, is_right: Callable[[Any], bool]) -> None:
    """Names the first that is wrong."""
    for place, value in enumerate(values):
        if not is_right(value):
            raise _wrong(sample, f"{name}[{place}] is {shown(value)}, it must be {what}")


def _whole_number(sample: Sample, name: str, value: Any) -> int:
    if not isinstance(value, numbers.Integral):
        raise _wrong(sample, f"{name} is {shown(value)}, it must be a whole number")
    return int(value)


def _wrong(sample: Sample, what: str) -> WrongAnswer:
    return WrongAnswer(f"returned a sample that breaks a rule: {sample.name}: {what}")
