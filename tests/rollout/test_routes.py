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
from vime.rollout.generate import SingleTurn, append
from vime.rollout.hooks import custom_conversion
from vime.rollout.routes import RouteCheck
from vime.types import Generation, Group, InvalidSample, RolloutBatch, Sample, SamplingParams, Status

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
    return RouteCheck(SHAPE)(to_rollout_batch(3, groups, scored))


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
    batch = RouteCheck(SHAPE)(custom(3, [[answered(0), answered(1), answered(2)]], scored))
    assert [sample.routed_experts is not None for sample in batch.samples] == [True, False, False]
    assert batch.metrics["rollout/routed_tokens"] == 3 / 9


def test_wrong_routes_of_a_custom_function_are_named() -> None:
    message = r"sample 1 \(group 0\): its rollout_routed_experts have the shape \[3, 2, 1\]; those of 4 tokens have at"
    with pytest.raises(InvalidSample, match=message):
        converted([[answered(0), answered(1, rollout_routed_experts=routes_of([5, 6, 7])[:, :, :1])]])


def test_a_row_for_the_token_that_was_never_computed_is_refused() -> None:
    with pytest.raises(InvalidSample, match=r"have the shape \[4, 2, 2\]; those of 4 tokens have at most \[3, 2, 2\]"):
        converted([[answered(0, rollout_routed_experts=routes_of([5, 6, 7, 8]))]])


def test_a_rollout_none_of_whose_trained_samples_has_routes_is_refused() -> None:
    """The one with routes is not trained on; nobody asks for those of a sample that is not."""
    group = [answered(0, rollout_routed_experts=None), answered(1, remove_sample=True)]
    message = r"--use-rollout-routing-replay: 1 of 1 samples .* have no rollout_routed_experts, the first is sample 0 "
    with pytest.raises(InvalidSample, match=message):
        converted([group])
    with pytest.raises(InvalidSample, match="1 of 1 samples"):
        converted([[answered(0, rollout_routed_experts=routes_of([]))]])


@pytest.mark.parametrize("needed", [True, False])
def test_samples_without_routes_are_named_once(caplog: pytest.LogCaptureFixture, needed: bool) -> None:
    """Where the log-prob pass chooses routes that engines did not tell, all samples may lack them."""
    without = answered(2, rollout_routed_experts=None)
    group = [answered(0), without] if needed else [without]
    check = RouteCheck(SHAPE, needed=needed)
    for rollout_id in range(3):
        check(to_rollout_batch(rollout_id, [group], scored))
    (record,) = caplog.records
    assert f"1 of {len(group)} samples that are trained have no rollout_routed_experts, the first is sample 2" in (
        record.getMessage()
    )


def engine_says(sample: Sample, *tokens: int) -> Generation:
    """The routes that are not known yet, as weights of version 2 choose them."""
    start = 0 if sample.rollout_routed_experts is None else len(sample.rollout_routed_experts)
    return Generation(
        token_ids=list(tokens),
        log_probs=[-0.5] * len(tokens),
        weight_versions=[2] * len(tokens),
        finish_reason="stop",
        routed_experts=routes_of([*sample.tokens, *tokens], version=2)[start:-1],
    )


def begun() -> Sample:
    """A prompt of 3 tokens and two that were sampled: 4 routes."""
    tokens = [*PROMPT, 1, 2]
    known: dict[str, Any] = {"rollout_log_probs": [-1.0, -2.0], "weight_versions": [1, 1], "loss_mask": [1, 1]}
    return Sample(index=7, tokens=tokens, response_length=2, rollout_routed_experts=routes_of(tokens[:-1]), **known)


async def test_tokens_that_are_taken_away_without_their_routes_are_refused() -> None:
    """Two are replaced by one: as many routes as tokens, and the fourth is that of a token which is gone."""
    sample = begun()
    sample.tokens, sample.response_length = [*PROMPT, 9], 1
    message = r"sample 7 .*: its rollout_routed_experts are those of 4 tokens, and of 4 tokens at most 3 .*Sample.cut"
    with pytest.raises(InvalidSample, match=message):
        append(sample, engine_says(sample, 5))
    generator = FakeGenerator()
    with pytest.raises(InvalidSample, match=message):
        await generated(generator, sample)
    assert generator.requests == []


def test_a_sample_that_is_cut_goes_on_with_the_routes_of_the_tokens_that_it_has() -> None:
    """One token of its own in place of two, of three, and of as many as were taken away."""
    for own in ([9], [9, 8], [9, 8, 7]):
        sample = begun()
        sample.cut(3)
        assert (sample.rollout_log_probs, sample.weight_versions, sample.loss_mask) == ([], [], [])
        assert np.array_equal(sample.rollout_routed_experts, routes_of(PROMPT[:-1]))
        sample.tokens, sample.response_length = [*PROMPT, *own], len(own)
        append(sample, engine_says(sample, 5, 6))
        expected = [routes_of(sample.tokens, 1)[:2], routes_of(sample.tokens, 2)[2:-1]]
        assert np.array_equal(sample.rollout_routed_experts, np.concatenate(expected))


def test_an_engine_that_tells_of_the_last_token_too_is_refused() -> None:
    sample = begun()
    told = replace(engine_says(sample, 5), routed_experts=routes_of([*sample.tokens, 5]))
    message = r"sample 7 .*: the routes of what was generated are those of 6 tokens, and only the first 5 of 6"
    with pytest.raises(InvalidSample, match=message):
        append(sample, told)
    assert sample == begun()


def test_routes_with_and_without_dense_layers_are_not_mixed() -> None:
    sample = begun()
    told = replace(engine_says(sample, 5), routed_experts=np.zeros((1, 3, 2), np.uint8))
    with pytest.raises(InvalidSample, match=r"sample 7 .*have \[3, 2\] layers and experts a token"):
        append(sample, told)


def test_samples_and_answers_with_other_routes_are_not_the_same() -> None:
    one, other = answered(0), answered(0)
    other.rollout_routed_experts = routes_of([5, 6, 8])
    assert one == answered(0) and one != other and one != answered(0, rollout_routed_experts=None)
    assert to_rollout_batch(3, [[one]], scored) != to_rollout_batch(3, [[other]], scored)
    sample = begun()
    assert engine_says(sample, 5) == engine_says(sample, 5)
    assert engine_says(sample, 5) != replace(engine_says(sample, 5), routed_experts=routes_of([2]))
