"""What becomes of engines when a sync fails, seen with engines that only write down what they are told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from vime.serving.http import EngineError
from vime.weights.plan import WeightPlan
from vime.weights.sync import SyncError, sync_engines
from vime.weights.transfers import SharedMemory


@dataclass
class FakeExport:
    plan: WeightPlan = field(default_factory=lambda: WeightPlan.of([("a", (2,), "float32"), ("b", (2,), "float32")]))
    path: str = "/proc/1/fd/1"


@dataclass(eq=False)
class FakeEngine:
    """Fails or hangs at one call."""

    url: str
    fails_at: str = ""
    hangs_at: str = ""
    dead: str | None = None
    calls: list[str] = field(default_factory=list)
    hangs: asyncio.Event = field(default_factory=asyncio.Event)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        async def call(*_arguments: object, timeout_s: float = 1.0) -> None:
            self.calls.append(name)
            if name == self.hangs_at:
                self.hangs.set()
                await asyncio.sleep(3600)
            if name == self.fails_at:
                raise EngineError(f"{self.url} answered {name} with 500: no")

        return call


async def sync(*engines: FakeEngine, asleep: bool = False) -> None:
    transfer = SharedMemory(FakeExport(), bucket_bytes=256)
    await sync_engines(transfer, engines, 7, asleep=asleep)  # type: ignore[arg-type]


async def test_the_order_of_a_sync() -> None:
    engine = FakeEngine("e0")
    await sync(engine)
    order = ["announce", "pause", "start_update", "update", "finish_update", "reset_prefix_cache", "resume"]
    assert engine.calls == order
    assert engine.dead is None


async def test_engines_that_sleep_are_not_resumed() -> None:
    """They have no memory for keys and values yet, and go on by themselves once they have."""
    engine = FakeEngine("e0")
    await sync(engine, asleep=True)
    assert engine.calls == ["announce", "start_update", "update", "finish_update", "reset_prefix_cache"]


async def test_engines_that_sleep_are_not_resumed_after_a_failure_either() -> None:
    good, bad = FakeEngine("e0"), FakeEngine("e1", fails_at="start_update")
    with pytest.raises(SyncError):
        await sync(good, bad, asleep=True)
    assert "resume" not in good.calls + bad.calls
    assert good.dead is None


async def test_if_one_engine_refuses_the_plan_no_engine_is_touched() -> None:
    good, bad = FakeEngine("e0"), FakeEngine("e1", fails_at="announce")
    with pytest.raises(SyncError, match="weight sync, step 'announce': e1 answered announce with 500"):
        await sync(good, bad)
    assert good.calls == bad.calls == ["announce"]
    assert good.dead is bad.dead is None


@pytest.mark.parametrize("step", ["pause", "start_update"])
async def test_an_engine_that_fails_before_it_loads_goes_on_with_the_old_weights(step: str) -> None:
    engine = FakeEngine("e0", fails_at=step)
    with pytest.raises(SyncError):
        await sync(engine)
    assert engine.calls[-1] == "resume"
    assert engine.dead is None


@pytest.mark.parametrize("step", ["update", "finish_update", "reset_prefix_cache", "resume"])
async def test_an_engine_that_fails_later_is_marked_dead_and_its_requests_are_ended(step: str) -> None:
    good, bad = FakeEngine("e0"), FakeEngine("e1", fails_at=step)
    with pytest.raises(SyncError, match=f"e1 answered {step} with 500") as caught:
        await sync(good, bad)
    assert list(caught.value.failures) == ["e1"]
    assert good.calls[-1] == "resume"
    assert good.dead is None
    assert bad.calls[-1] == "abort_all"
    assert bad.dead is not None


async def cancelled(slow: FakeEngine, *others: FakeEngine) -> None:
    """A sync that is cancelled where ``slow`` hangs."""
    task = asyncio.create_task(sync(slow, *others))
    await slow.hangs.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_sync_that_is_cancelled_before_anything_was_loaded_leaves_no_engine_paused() -> None:
    slow, ready = FakeEngine("e0", hangs_at="start_update"), FakeEngine("e1")
    await cancelled(slow, ready)
    assert slow.calls[-1] == ready.calls[-1] == "resume"
    assert slow.dead is ready.dead is None


async def test_a_sync_that_is_cancelled_later_leaves_no_engine_in_service() -> None:
    slow, ready = FakeEngine("e0", hangs_at="update"), FakeEngine("e1")
    await cancelled(slow, ready)
    assert slow.calls[-1] == ready.calls[-1] == "abort_all"
    assert slow.dead is not None and ready.dead is not None
