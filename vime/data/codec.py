"""Samples as JSON, for checkpoints and dumps; every field survives.

NumPy is imported where there are routes to pack: where flags are explained nobody has a use for it.
"""

from __future__ import annotations

import binascii
import dataclasses
import json
import math
from typing import Any

from vime.errors import UserError
from vime.rewards.wire import grade_from_json, grade_to_json
from vime.types import RoutedExperts, Sample, Status


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """All fields of a sample as JSON values. Nothing is copied.

    Raises:
        UserError: a field, e.g. a metadata value that a hook put there, is nothing that JSON can hold.
    """
    record = _checked(sample)
    routes = record["rollout_routed_experts"]
    return record | {"rollout_routed_experts": None if routes is None else _array_to_json(routes)}


def check_sample(sample: Sample) -> None:
    """Finds out whether JSON can hold a sample, without the work of packing it; raises as ``sample_to_json`` does."""
    _checked(sample)


def _checked(sample: Sample) -> dict[str, Any]:
    """All fields as JSON values, but for the routes, which are as they are."""
    record = {each.name: getattr(sample, each.name) for each in dataclasses.fields(sample)}
    record["status"] = sample.status.value
    record["grade"] = grade_to_json(sample.grade) if sample.grade is not None else None
    for name, value in record.items():
        if name != "rollout_routed_experts":
            _check(sample, name, value)
    if sample.rollout_routed_experts is not None:
        _check_routes(sample)
    return record


def sample_from_json(record: dict[str, Any]) -> Sample:
    """The sample of ``sample_to_json``. Tuples have become lists, and keys of dicts strings."""
    grade, routes = record["grade"], record.get("rollout_routed_experts")  # which older files lack
    fields = {
        **record,
        "status": Status(record["status"]),
        "grade": grade_from_json(grade) if grade is not None else None,
        "rollout_routed_experts": None if routes is None else _array_from_json(routes),
    }
    return Sample(**fields)


def _array_to_json(array: RoutedExperts) -> dict[str, Any]:
    """Numbers as base64 of their bytes, little-endian: a list of them would be four times as long."""
    import numpy as np

    packed = np.ascontiguousarray(array, np.dtype(array.dtype).newbyteorder("<"))
    data = binascii.b2a_base64(packed.tobytes(), newline=False).decode()
    return {"dtype": packed.dtype.str, "shape": list(packed.shape), "data": data}


def _array_from_json(record: dict[str, Any]) -> RoutedExperts:
    import numpy as np

    return np.frombuffer(binascii.a2b_base64(record["data"]), np.dtype(record["dtype"])).reshape(record["shape"])


def _check_routes(sample: Sample) -> None:
    import numpy as np

    routes: Any = sample.rollout_routed_experts
    if not isinstance(routes, np.ndarray) or routes.dtype.kind not in "iu":
        raise UserError(
            f"{sample.name}: rollout_routed_experts must be a numpy array of integers, not {type(routes).__name__}"
        )


def _check(sample: Sample, name: str, value: Any) -> None:
    if isinstance(value, list) and set(map(type, value)) <= {int, float} and all(map(math.isfinite, value)):
        return  # of thousands of tokens; to write them all would take ten times as long
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{sample.name}: {name} cannot be kept in a checkpoint ({error}); samples that go back to the data source "
            "may hold only finite numbers, texts, lists and dicts"
        ) from None
