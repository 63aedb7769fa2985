"""New weights in running engines over a process group: what a trainer on another machine does."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest
import torch

from tests.serving.conftest import (
    PROMPT,
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
from vime.weights import broadcast
from vime.weights.invitation import Invitation, SendReport
from vime.weights.plan import WeightPlan
from vime.weights.sync import SyncError, sync_engines
from vime.weights.transfers import Broadcast

BUCKET_BYTES = 40_000
TIMEOUT_S = 60.0


class Trainer:
    """The trainer's end, in threads of this process; ``weights`` are those that it sends next."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.sender: broadcast.Sender | None = None
        self.groups = 0

    async def weight_plan(self, version: int) -> WeightPlan:
        return plan_of(self.weights)

    async def invite_engines(self, members: int, timeout_s: float) -> Invitation:
        self.groups += 1
        self.sender = broadcast.Sender("127.0.0.1", members, timeout_s=TIMEOUT_S)
        return self.sender.invitation

    async def join_engines(self) -> None:
        assert self.sender is not None
        await asyncio.to_thread(self.sender.join)

    async def broadcast_weights(self, bucket_bytes: int) -> SendReport:
        assert self.sender is not None
        return await asyncio.to_thread(self.sender.send, plan_of(self.weights), bucket_bytes, self.items())

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.weights.items())


@pytest.fixture
def trainer(tied_engine: Served, tied: Sender) -> Iterator[Trainer]:
    trainer = Trainer(tied_engine.weights)
    yield trainer
    if trainer.sender is not None:
        trainer.sender.close()


async def test_new_weights_are_broadcast_in_buckets_as_often_as_wanted(
    trainer: Trainer, tied_engine: Served, control: EngineControl
) -> None:
    assert len(list(plan_of(trainer.weights).buckets(BUCKET_BYTES))) > 4
    transfer = Broadcast(trainer, bucket_bytes=BUCKET_BYTES)
    for seed in (1, 2):
        trainer.weights = changed(tied_engine.weights, seed=seed)
        await sync_engines(transfer, [control], 100 + seed)
        await assert_serves(tied_engine, control, trainer.weights)
        assert await control.weight_version() == 100 + seed
    assert trainer.groups == 1


async def test_a_request_in_flight_goes_on_under_the_weights_that_are_broadcast(
    trainer: Trainer, tied_engine: Served, control: EngineControl
) -> None:
    old = tied_engine.weights
    transfer = Broadcast(trainer, bucket_bytes=BUCKET_BYTES)
    await sync_engines(transfer, [control], 200)
    running = asyncio.create_task(generate_on(control, PROMPT, SamplingParams(max_tokens=480, ignore_eos=True)))
    await generating(control.url)
    trainer.weights = changed(old, seed=4)
    await sync_engines(transfer, [control], 201)
    generation = await running

    assert generation.finish_reason == "length"
    switch = generation.weight_versions.index(201)
    assert list(generation.weight_versions) == [200] * switch + [201] * (480 - switch)
    assert switch > 0
    log_probs = torch.tensor(generation.log_probs)
    for weights, part in ((old, slice(switch)), (trainer.weights, slice(switch, None))):
        expected = reference(tied_engine.folder, weights, PROMPT, generation.token_ids)
        assert (log_probs - expected)[part].abs().max() < TOLERANCE


async def test_an_engine_with_half_of_the_weights_can_be_sent_all_of_them(
    trainer: Trainer, tied_engine: Served, control: EngineControl
) -> None:
    """The transmission breaks off in the middle of a layer; what was loaded until then must leave nothing behind."""

    class BreaksOff(Trainer):
        def items(self) -> Iterator[tuple[str, torch.Tensor]]:
            return itertools.islice(self.weights.items(), 9)

    broken = BreaksOff(changed(tied_engine.weights, seed=5))
    with pytest.raises(broadcast.PlanMismatch, match="nothing is to be sent where the plan has"):
        await sync_engines(Broadcast(broken, bucket_bytes=BUCKET_BYTES), [control], 300)
    assert control.dead is not None
    control.dead = None

    trainer.weights = changed(tied_engine.weights, seed=6)
    await sync_engines(Broadcast(trainer, bucket_bytes=BUCKET_BYTES), [control], 301)
    await assert_serves(tied_engine, control, trainer.weights)


async def test_the_engine_compares_what_arrived_with_what_the_sender_states(
    trainer: Trainer, tied_engine: Served, control: EngineControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = broadcast.checksum
    monkeypatch.setattr(broadcast, "checksum", lambda data: real(data) + (len(data) > broadcast.GREETING_BYTES))
    with pytest.raises(SyncError, match=r"WrongBytes: model.embed_tokens.weight to .*what arrived is not what was"):
        await sync_engines(Broadcast(trainer, bucket_bytes=BUCKET_BYTES), [control], 400)
    assert control.dead is not None
