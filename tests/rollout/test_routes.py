"""Routes of engines on their way into samples and batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.rollout.fakes import FakeGenerator, routes_of
from vime.data.codec import sample_from_json, sample_to_json
from vime.models.routes import RouteShape
from vime.plugins import Hook
from vime.rollout.conversion import to_rollout_batch
from vime.rollout.generate import SingleTurn
from vime.rollout.hooks import custom_conversion
from vime.rollout.routes import with_checked_routes
from vime.types import Group, InvalidSample, RolloutBatch, Sample, SamplingParams, Status

PROMPT = [11, 12, 13]
SHAPE = RouteShape(num_layers=2, layers=(0, 1), num_experts=8, top_k=2)
PARAMS = SamplingParams(max_tokens=20, seed=1, routed_experts_prompt_start=0)


async def generated(generator: FakeGenerator, sample: Sample, params: SamplingParams = PARAMS) -> Sample:
    return await SingleTurn(generator, lambda prompt: PROMPT, str, max_context=64)(sample, params)


async def test_a_response_has_the_routes_of_all_tokens_but_the_last() -> None:
    sample = await generated(FakeGenerator(), Sample(index=0))
    assert np.array_equal(sample.rollout_routed_experts, routes_of(sample.tokens[:-1]))


async def test_a_response_that_goes_on_keeps_the_routes_that_it_was_sampled_with() -> None:
    """Across a checkpoint, and with other weights; the token that was the last has got its route meanwhile."""
    sample = await generated(FakeGenerator(finish_reason="abort"), Sample(index=0), replace(PARAMS, max_tokens=5))
    length = len(sample.tokens)
    assert sample.status is Status.ABORTED and length < 3 + 20
    generator = FakeGenerator(version=2)
    sample = await generated(generator, sample_from_json(json.loads(json.dumps(sample_to_json(sample)))))
    assert generator.requests[0][1].routed_experts_prompt_start == length - 1
    old, new = routes_of(sample.tokens, 1), routes_of(sample.tokens, 2)
    assert np.array_equal(sample.rollout_routed_experts, np.concatenate([old[: length - 1], new[length - 1 : -1]]))


async def test_a_sample_that_begins_anew_or_where_nobody_wants_routes_has_none() -> None:
    sample = await generated(FakeGenerator(), Sample(index=0))
    assert sample.restarted().rollout_routed_experts is None
    unwanted = await generated(FakeGenerator(), Sample(index=0), replace(PARAMS, routed_experts_prompt_start=None))
    assert unwanted.rollout_routed_experts is None


def scored(samples: list[Sample]) -> tuple[list[float], list[float]]:
    rewards = [sample.score() for sample in samples]
    return rewards, rewards


def answered(number: int, **fields: Any) -> Sample:
    tokens = [5, 6, 7, 8 + number]
    base: dict[str, Any] = {"index": number, "group_index": 0, "tokens": tokens, "response_length": 2, "reward": 1.0}
    base |= {"status": Status.COMPLETED, "rollout_routed_experts": routes_of(tokens[:-1])}
    return Sample(**(base | fields))


def converted(groups: Sequence[Group]) -> RolloutBatch:
    return with_checked_routes(to_rollout_batch, SHAPE)(3, groups, scored)


def test_a_batch_tells_how_many_of_the_tokens_that_are_computed_have_a_route() -> None:
    """Of 3 + 3 + 3 + 3; a sample that failed takes its place without one."""
    some = routes_of([5, 6, 7]).astype(np.int16)
    some[1, 0, 0] = -1
    group = [
        answered(0),
        answered(1, rollout_routed_experts=some[:2]),
        answered(2, rollout_routed_experts=None),
        answered(3, status=Status.FAILED),
    ]
    batch = converted([group])
    assert batch.metrics["rollout/routed_tokens"] == 4 / 12
    routes = [sample.routed_experts for sample in batch.samples]
    assert np.array_equal(routes[0], routes_of([5, 6, 7])) and routes[2] is routes[3] is None
    assert routes[1] is not None and routes[1].tolist() == [some[0].tolist(), [[-1, -1], some[1, 1].tolist()]]


def test_rows_of_a_custom_conversion_have_the_routes_of_samples_with_the_same_tokens() -> None:
    def rows(args: Any, samples: list[Sample]) -> dict[str, Any]:
        first, second, third = (sample.tokens for sample in samples)
        tokens = [first, [4, *second[1:]], third]
        return {"tokens": tokens, "response_lengths": [2, 2, 0], "rewards": [1.0] * 3}

    custom = custom_conversion(
        Hook(rows, "--flag", "mine:rows"), SimpleNamespace(reward_key=None, global_batch_size=3), None
    )
    batch = with_checked_routes(custom, SHAPE)(3, [[answered(0), answered(1), answered(2)]], scored)
    assert [sample.routed_experts is not None for sample in batch.samples] == [True, False, False]
    assert batch.metrics["rollout/routed_tokens"] == 3 / 9


def test_wrong_routes_of_a_custom_function_are_named() -> None:
    message = r"sample 1 \(group 0\): its rollout_routed_experts have the shape \[3, 2, 1\]; those of 4 tokens have"
    with pytest.raises(InvalidSample, match=message):
        converted([[answered(0), answered(1, rollout_routed_experts=routes_of([5, 6, 7])[:, :, :1])]])
