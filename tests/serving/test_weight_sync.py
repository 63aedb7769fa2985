"""New weights in running engines: they arrive whole, under a version, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from tests.serving.conftest import (
    PROMPT,
    SAMPLED,
    TOLERANCE,
    Sender,
    Served,
    Weights,
    assert_serves,
    changed,
    generate_on,
    generating,
    plan_of,
    reference,
)
from vime.serving.control import EngineControl
from vime.types import SamplingParams
from vime.weights.probe import ProbeFailed, probe
from vime.weights.sync import SyncError


@pytest.fixture
async def untied(untied_engine: Served) -> AsyncIterator[Sender]:
    control = EngineControl(untied_engine.url, "engine 0")
    yield Sender(untied_engine.weights, control)
    await control.close()


async def test_new_weights_are_served_with_a_tied_output_layer(tied: Sender, tied_engine: Served) -> None:
    """vLLM alone would keep the old output layer here."""
    new = changed(tied_engine.weights, seed=1)
    version, _ = await tied.send(new)
    await assert_serves(tied_engine, tied.control, new)
    assert await tied.control.weight_version() == version


async def test_new_weights_are_served_with_an_output_layer_of_its_own(untied: Sender, untied_engine: Served) -> None:
    for seed in (1, 2):
        new = changed(untied_engine.weights, seed=seed)
        await untied.send(new)
        await assert_serves(untied_engine, untied.control, new)


async def test_weights_may_come_in_several_buckets(untied: Sender, untied_engine: Served) -> None:
    new = changed(untied_engine.weights, seed=3)
    await untied.send(new, bucket_bytes=100_000)
    assert len(list(untied.plan.buckets(100_000))) > 5
    await assert_serves(untied_engine, untied.control, new)


async def test_tokens_know_the_version_that_made_them_across_a_sync(tied: Sender, tied_engine: Served) -> None:
    """A request in flight goes on under the new weights, with its keys and values computed anew."""
    old, new = tied_engine.weights, changed(tied_engine.weights, seed=4)
    before, _ = await tied.send(old)
    long = SamplingParams(max_tokens=480, ignore_eos=True)
    running = asyncio.create_task(generate_on(tied.control, PROMPT, long))
    await generating(tied.control.url)
    after, _ = await tied.send(new)
    generation = await running

    assert generation.finish_reason == "length"
    assert sorted(set(generation.weight_versions)) == [before, after]
    switch = generation.weight_versions.index(after)
    assert generation.weight_versions == [before] * switch + [after] * (480 - switch)
    log_probs = torch.tensor(generation.log_probs)
    by_old = reference(tied_engine.folder, old, PROMPT, generation.token_ids)
    by_new = reference(tied_engine.folder, new, PROMPT, generation.token_ids)
    assert (log_probs - by_old)[:switch].abs().max() < TOLERANCE
    assert (log_probs - by_new)[switch:].abs().max() < TOLERANCE


def without_a_tensor(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}


def with_a_foreign_tensor(weights: Weights) -> Weights:
    return weights | {"model.layers.7.mlp.up_proj.weight": torch.zeros(2, 2)}


def with_a_wrong_shape(weights: Weights) -> Weights:
    return weights | {"model.norm.weight": torch.ones(32)}


def with_a_wrong_dtype(weights: Weights) -> Weights:
    return {name: tensor.bfloat16() for name, tensor in weights.items()}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_a_tensor, "missing tensors: model.norm.weight"),
        (with_a_foreign_tensor, "unknown tensors: model.layers.7.mlp.up_proj.weight"),
        (with_a_wrong_shape, r"model.norm.weight has shape \[32\] instead of \[64\]"),
        (with_a_wrong_dtype, "model.embed_tokens.weight is bfloat16, the engine serves float32"),
    ],
)
async def test_a_wrong_plan_is_refused_before_anything_moves(
    spoil: object, message: str, tied: Sender, tied_engine: Served
) -> None:
    version = await tied.control.weight_version()
    spoilt = spoil(changed(tied_engine.weights, seed=5))  # type: ignore[operator]
    sender = Sender(spoilt, tied.control)
    with pytest.raises(SyncError, match=rf"step 'announce': engine 0 \(http://.*\).*{message}"):
        await sender.send(spoilt)
    assert tied.control.dead is None
    assert not await tied.control.is_paused()
    assert await tied.control.weight_version() == version
    await assert_serves(tied_engine, tied.control, tied_engine.weights)


async def test_an_unreadable_buffer_is_an_error_that_leaves_the_old_weights(tied: Sender, tied_engine: Served) -> None:
    class Gone(Sender):
        path = "/proc/1/fd/99999"

    with pytest.raises(SyncError, match=r"step 'load'.*No such file"):
        await Gone(tied_engine.weights, tied.control).send(tied_engine.weights)
    assert tied.control.dead is not None  # it may have loaded something; only the engine itself knows that it has not
    tied.control.dead = None
    await tied.control.resume()
    await assert_serves(tied_engine, tied.control, tied_engine.weights)


async def test_a_dead_engine_is_named_together_with_the_step(tied_engine: Served) -> None:
    nobody = EngineControl("http://127.0.0.1:9", "engine 5")
    with pytest.raises(
        SyncError, match=r"step 'announce': engine 5 \(http://127.0.0.1:9\) cannot be reached"
    ) as caught:
        await Sender(tied_engine.weights, nobody).send(tied_engine.weights)
    assert list(caught.value.failures) == ["http://127.0.0.1:9"]
    await nobody.close()


async def test_the_probe_compares_the_engine_with_the_trainer(tied: Sender, tied_engine: Served) -> None:
    trainers = changed(tied_engine.weights, seed=6)

    async def log_probs_of(token_ids: list[int], prompt_length: int) -> list[float]:
        prompt, response = token_ids[:prompt_length], token_ids[prompt_length:]
        return reference(tied_engine.folder, trainers, prompt, response).tolist()

    with pytest.raises(ProbeFailed, match=r"engine 0 \(http://.*\) and the trainer differ by"):
        await probe([tied.control], log_probs_of, range(1, 17), tolerance=0.05)
    await tied.send(trainers)
    report = await probe([tied.control], log_probs_of, range(1, 17), tolerance=0.05)
    assert report.max_difference < TOLERANCE


def test_the_sender_of_these_tests_sends_what_the_folder_has(tied_engine: Served) -> None:
    assert len(plan_of(tied_engine.weights).tensors) == 20  # embedding, final norm, 9 for each of 2 layers
    assert SAMPLED.temperature == 1.0
