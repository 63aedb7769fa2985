"""Routes in checkpoints and dumps: exact, and not much larger than they are."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from vime.data.codec import check_sample, sample_from_json, sample_to_json
from vime.errors import UserError
from vime.types import Sample


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_routes_survive_exactly(dtype: type) -> None:
    rng = np.random.default_rng(0)
    routes = rng.integers(-1 if dtype is np.int16 else 0, 128, (500, 4, 8)).astype(dtype)
    text = json.dumps(sample_to_json(Sample(index=0, rollout_routed_experts=routes[::2])))  # a view, not contiguous
    assert len(text) < 1.34 * routes[::2].nbytes + 1000
    found = sample_from_json(json.loads(text)).rollout_routed_experts
    assert found is not None and found.dtype == dtype
    assert np.array_equal(found, routes[::2])


def test_a_sample_without_routes_and_one_of_an_older_version_have_none() -> None:
    record = sample_to_json(Sample(index=0))
    assert sample_from_json(record).rollout_routed_experts is None
    del record["rollout_routed_experts"]
    assert sample_from_json(record) == Sample(index=0)


@pytest.mark.parametrize("look", [check_sample, sample_to_json])
def test_routes_that_are_no_array_are_named(look: Callable[[Sample], object]) -> None:
    sample = Sample(index=3, group_index=1, rollout_routed_experts=[[[0, 1]]])  # type: ignore[arg-type]
    message = r"sample 3 \(group 1, no rollout\): rollout_routed_experts must be a numpy array of integers, not list"
    with pytest.raises(UserError, match=message):
        look(sample)


def test_a_sample_is_checked_without_its_routes_being_packed() -> None:
    routes = np.zeros((4000, 48, 8), np.uint8)
    sample = Sample(index=0, rollout_routed_experts=routes)
    tracemalloc.start()
    check_sample(sample)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < routes.nbytes / 100
