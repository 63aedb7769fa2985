"""Broadcasts to several engines, of which some fail. Senders and receivers are real, and speak through gloo; only the
HTTP servers in front of the receivers are left out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from vime.serving.http import EngineError
from vime.weights.broadcast import Receiver, Sender, moved
from vime.weights.invitation import Invitation, SendReport
from vime.weights.plan import WeightPlan
from vime.weights.shm import view
from vime.weights.sync import SyncError, sync_engines
from vime.weights.transfers import Broadcast

BUCKET = 4096
WEIGHTS = {str(number): torch.full((1024,), float(number)) for number in range(6)}  # a bucket each
PLAN = WeightPlan.of((name, tensor.shape, "float32") for name, tensor in WEIGHTS.items())


class Trainer:
    """Implements ``transfers.Broadcaster`` in threads."""

    def __init__(self) -> None:
        self.sender: Sender | None = None
        self.groups: list[int] = []

    async def weight_plan(self, version: int) -> WeightPlan:
        return PLAN

    async def invite_engines(self, members: int, timeout_s: float) -> Invitation:
        if self.sender is not None:
            self.sender.close()
        self.groups.append(members)
        self.sender = Sender("127.0.0.1", members, timeout_s=20.0)
        return self.sender.invitation

    async def join_engines(self) -> None:
        assert self.sender is not None
        await asyncio.to_thread(self.sender.join)

    async def broadcast_weights(self, bucket_bytes: int) -> SendReport:
        assert self.sender is not None
        return await asyncio.to_thread(self.sender.send, PLAN, bucket_bytes, iter(WEIGHTS.items()))


class Engine:
    """Its processes are threads. ``fails``: what to do with a receiver instead of loading from it."""

    def __init__(self, url: str, processes: int = 1, fails: Callable[[Receiver], None] | None = None) -> None:
        self.url, self._processes, self._fails = url, processes, fails
        self.dead: str | None = None
        self.calls: list[str] = []
        self.receivers: list[Receiver] = []
        self.loaded: list[dict[str, Tensor]] = []

    async def world_size(self, *, timeout_s: float) -> int:
        return self._processes

    async def announce(self, info: dict[str, Any], *, timeout_s: float) -> None:
        self.calls.append("announce")
        if "world_size" not in info:
            return
        names = ("address", "port", "secret", "world_size", "timeout_s")
        invitation = Invitation(**{name: info[name] for name in names})
        ranks = range(info["rank_offset"], info["rank_offset"] + self._processes)
        joins = (asyncio.to_thread(Receiver, invitation, rank, f"rank {rank}") for rank in ranks)
        self.receivers = list(await asyncio.gather(*joins))

    async def update(self, info: dict[str, Any], *, timeout_s: float) -> None:
        self.calls.append("update")
        try:
            loads = (asyncio.to_thread(self._load, receiver, info["bucket_bytes"]) for receiver in self.receivers)
            self.loaded = await asyncio.gather(*loads)
        except Exception as error:
            raise EngineError(f"{self.url} answered update with 500: {error}") from None

    def _load(self, receiver: Receiver, bucket_bytes: int) -> dict[str, Tensor]:
        found = {}
        try:
            for bucket, data in receiver.receive(PLAN, bucket_bytes):
                found.update({spec.name: view(data, moved(spec, bucket)).clone() for spec in bucket})
                if self._fails is not None and len(found) == 3:
                    self._fails(receiver)
        except BaseException as error:
            receiver.close(error)
            raise
        return found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        async def call(*_: object, **__: object) -> None:
            self.calls.append(name)

        return call


@pytest.fixture
async def trainer() -> AsyncIterator[Trainer]:
    trainer = Trainer()
    yield trainer
    if trainer.sender is not None:
        trainer.sender.close()


async def sync(transfer: Broadcast, *engines: Engine) -> None:
    await sync_engines(transfer, engines, 7)  # type: ignore[arg-type]


def has_everything(engine: Engine) -> bool:
    return len(engine.loaded) == engine._processes and all(
        each.keys() == WEIGHTS.keys() and all(torch.equal(each[name], WEIGHTS[name]) for name in WEIGHTS)
        for each in engine.loaded
    )


def vanishes(receiver: Receiver) -> None:
    """As when the process was killed: the connections end without a word."""
    receiver._lifeline.close()
    raise OSError("killed")


def runs_out_of_memory(receiver: Receiver) -> None:
    raise RuntimeError("CUDA out of memory")


async def test_one_group_reaches_engines_of_several_sizes_and_is_kept(trainer: Trainer) -> None:
    transfer = Broadcast(trainer, bucket_bytes=BUCKET)
    small, large = Engine("e0"), Engine("e1", processes=2)
    for _ in range(2):
        await sync(transfer, small, large)
        assert has_everything(small) and has_everything(large)
        small.loaded, large.loaded = [], []
    assert trainer.groups == [3]
    order = ["pause", "start_update", "update", "finish_update", "reset_prefix_cache", "resume"]
    assert small.calls == ["announce", "announce", *order, "announce", *order]


@pytest.mark.parametrize("fails", [vanishes, runs_out_of_memory])
async def test_the_others_get_everything_when_an_engine_fails_half_way(
    trainer: Trainer, fails: Callable[[Receiver], None]
) -> None:
    """They have half of the new weights then: a group without the failed one is made, and all is sent again."""
    transfer = Broadcast(trainer, bucket_bytes=BUCKET)
    good, bad, large = Engine("e0"), Engine("e1", fails=fails), Engine("e2", processes=2)
    begin = time.monotonic()
    with pytest.raises(SyncError, match="e1 answered update with 500") as caught:
        await sync(transfer, good, bad, large)
    assert time.monotonic() - begin < 15
    assert list(caught.value.failures) == ["e1"]
    assert has_everything(good) and has_everything(large)
    assert trainer.groups == [4, 3]
    assert bad.dead is not None and bad.calls[-1] == "abort_all"
    for engine in (good, large):
        assert engine.dead is None
        assert engine.calls[-1] == "resume"
        assert engine.calls.count("start_update") == 2

    await sync(transfer, good, large)  # the run goes on without it
    assert trainer.groups == [4, 3]


async def test_an_engine_that_cannot_be_paused_keeps_nobody_waiting(trainer: Trainer) -> None:
    class Deaf(Engine):
        async def pause(self, *_: object, **__: object) -> None:
            raise EngineError("e1 answered pause with 500")

    good, deaf = Engine("e0"), Deaf("e1")
    with pytest.raises(SyncError, match="step 'pause': e1 answered pause with 500"):
        await sync(Broadcast(trainer, bucket_bytes=BUCKET), good, deaf)
    assert has_everything(good)
    assert deaf.dead is None, "its old weights are untouched"
    assert deaf.calls[-1] == "resume"
    assert trainer.groups == [2, 1]


async def test_an_engine_that_refuses_the_plan_is_heard_before_anybody_waits_in_a_group(trainer: Trainer) -> None:
    class Refuses(Engine):
        async def announce(self, info: dict[str, Any], *, timeout_s: float) -> None:
            raise EngineError("e1: unknown tensors")

    good = Engine("e0")
    with pytest.raises(SyncError, match="step 'announce': e1: unknown tensors"):
        await sync(Broadcast(trainer, bucket_bytes=BUCKET), good, Refuses("e1"))
    assert good.calls == ["announce"]
    assert trainer.groups == []


async def test_engines_that_have_everything_go_on_when_the_others_find_no_group_again(trainer: Trainer) -> None:
    """One lacks the weights after the broadcast, and the group that is to bring them to it does not come about."""

    class Forgetful(Engine):
        async def update(self, info: dict[str, Any], *, timeout_s: float) -> None:
            await super().update(info, timeout_s=timeout_s)
            raise EngineError("e1 answered update with 500")

        async def announce(self, info: dict[str, Any], *, timeout_s: float) -> None:
            if "update" in self.calls:
                trainer.sender.close()  # type: ignore[union-attr]
                raise EngineError("e1 answered announce with 500")
            await super().announce(info, timeout_s=timeout_s)

    transfer = Broadcast(trainer, bucket_bytes=BUCKET)
    good, forgetful, blamed = Engine("e0"), Forgetful("e1"), Forgetful("e2")
    original = trainer.broadcast_weights

    async def blames(bucket_bytes: int) -> SendReport:
        return replace(await original(bucket_bytes), failures={3: "rank 3 is gone"})

    trainer.broadcast_weights = blames  # type: ignore[method-assign]
    with pytest.raises(SyncError, match="step 'join': e1 answered announce with 500") as caught:
        await sync(transfer, good, forgetful, blamed)
    assert list(caught.value.failures) == ["e2", "e1"]
    assert "the trainer says: " in caught.value.failures["e1"]
    assert has_everything(good) and good.dead is None and good.calls[-1] == "resume"


async def test_a_failure_of_the_trainer_is_raised_as_it_is(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered() -> Any:
        yield from list(WEIGHTS.items())[:4]
        raise RuntimeError("CUDA out of memory")

    async def broadcast_weights(bucket_bytes: int) -> SendReport:
        assert trainer.sender is not None
        return await asyncio.to_thread(trainer.sender.send, PLAN, bucket_bytes, gathered())

    transfer = Broadcast(trainer, bucket_bytes=BUCKET)
    engine = Engine("e0")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="CUDA out of memory"):
        patch.setattr(trainer, "broadcast_weights", broadcast_weights)
        await sync(transfer, engine)
    await sync(transfer, engine)
    assert trainer.groups == [1, 1], "the group was gone"
