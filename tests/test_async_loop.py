"""The order of things in the asynchronous loop, over fakes that write down what they are asked."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.rollout.fakes import FakeGenerator, FakeSource
from tests.rollout.test_manager import make
from tests.rollout.worlds import on_virtual_clock
from vime import async_loop, loop
from vime.loop import Schedule
from vime.rollout.sampling import Collected, InFlight
from vime.rollout.staleness import StalenessBound
from vime.types import RolloutBatch, Sample, TrainResult


class World:
    """Every port of the loops; ``said`` has what happened, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.version = 0

    def begin(self, rollout_id: int) -> None:
        self.said.append(f"begin {rollout_id}")

    async def generate(self, rollout_id: int) -> RolloutBatch:
        self.said.append(f"generate {rollout_id}")
        return RolloutBatch(rollout_id=rollout_id, samples=())

    def synced(self, version: int, trainings: int) -> None:
        self.said.append(f"version {version} after {trainings}")

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        self.said.append(f"evaluate {rollout_id}")
        return {}

    async def train(self, batch: RolloutBatch) -> TrainResult:
        self.said.append(f"train {batch.rollout_id}")
        return TrainResult(steps=({},))

    async def sync(self) -> int:
        self.version += 1
        return self.version

    async def save(self, rollout_id: int) -> Path:
        self.said.append(f"save {rollout_id}")
        return Path()

    def phase(self, name: str):  # type: ignore[no-untyped-def]
        return nullcontext()

    def evaluated(self, rollout_id: int, metrics: dict[str, float]) -> None: ...

    def trained(self, batch: RolloutBatch, result: TrainResult) -> None: ...


async def run(train, schedule: Schedule, **ports) -> list[str]:  # type: ignore[no-untyped-def]
    world = World()
    given = {"rollouts": world, "actor": world, "weights": world, "checkpoints": world, "report": world} | ports
    await train(schedule, **given)
    return world.said


async def test_the_next_rollout_begins_before_this_one_is_trained_on_and_a_checkpoint_comes_last():
    schedule = Schedule(start=0, stop=2, save_interval=1, eval_interval=1, evaluates_first=True)
    assert await run(async_loop.train, schedule) == [
        *("version 1 after 0", "evaluate 0"),
        *("generate 0", "begin 1", "train 0", "version 2 after 1", "evaluate 1", "save 0"),
        *("generate 1", "train 1", "version 3 after 2", "evaluate 2", "save 1"),
    ]


async def test_but_for_that_it_is_the_synchronous_loop():
    schedule = Schedule(start=2, stop=5, save_interval=2, eval_interval=2, saves_at_end=True)
    without = [line for line in await run(async_loop.train, schedule) if not line.startswith("begin")]
    assert without == await run(loop.train, schedule)


async def test_weights_go_out_at_an_interval_and_in_the_end():
    said = await run(async_loop.train, Schedule(start=0, stop=5, sync_interval=2))
    assert [line for line in said if line.startswith("version")] == [
        *("version 1 after 0", "version 2 after 2", "version 3 after 4", "version 4 after 5"),
    ]


def bounded(generator: FakeGenerator, max_staleness: int, **options):  # type: ignore[no-untyped-def]
    """A manager of rollouts of 3 groups of 4 samples, as a run with that bound has it."""
    ahead = max_staleness > 0
    bound = StalenessBound(max_staleness=max_staleness, batch_size=3, runs_ahead=ahead)
    in_flight = InFlight.LEAVE if ahead else InFlight.RESTART
    return make(generator, bound=bound, in_flight=in_flight, **options)[0]


class Slow(World):
    """A trainer and a weight sync that take time and tell the generator."""

    def __init__(self, generator: FakeGenerator, train_s: float) -> None:
        super().__init__()
        self.generator, self.train_s = generator, train_s
        self.asked_while_training: list[int] = []

    async def train(self, batch: RolloutBatch) -> TrainResult:
        before = len(self.generator.requests)
        await asyncio.sleep(self.train_s)
        self.asked_while_training.append(len(self.generator.requests) - before)
        return await super().train(batch)

    async def sync(self) -> int:
        self.generator.version = await super().sync()
        return self.generator.version


@pytest.mark.parametrize(
    ("max_staleness", "asked"),
    [(0, [0, 0, 0]), (1, [12, 12, 0])],
)
def test_how_far_it_runs_ahead_is_the_bound_of_staleness(max_staleness, asked):
    async def main() -> None:
        generator = FakeGenerator()
        manager = bounded(generator, max_staleness, concurrency=12)
        slow = Slow(generator, 0.1)
        said = await run(async_loop.train, Schedule(start=0, stop=3), rollouts=manager, actor=slow, weights=slow)
        assert said == [] and slow.asked_while_training == asked

    on_virtual_clock(main)


async def test_without_staleness_it_makes_the_numbers_of_the_synchronous_loop():
    batches = {}
    for name, train in (("async", async_loop.train), ("sync", loop.train)):
        generator = FakeGenerator()
        manager = bounded(generator, 0)
        slow = Slow(generator, 0.0)
        taken: list[RolloutBatch] = []

        async def take(batch: RolloutBatch, taken=taken, slow=slow) -> TrainResult:  # type: ignore[no-untyped-def]
            taken.append(batch)
            return await World.train(slow, batch)

        slow.train = take  # type: ignore[method-assign]
        await run(train, Schedule(start=0, stop=3), rollouts=manager, actor=slow, weights=slow)
        batches[name] = taken
    assert [batch.samples for batch in batches["async"]] == [batch.samples for batch in batches["sync"]]


async def test_what_the_early_rollout_raises_the_loop_raises():
    class Broken(FakeGenerator):
        async def generate(self, token_ids, params, *, session_id):  # type: ignore[no-untyped-def]
            if len(self.requests) >= 12:
                raise RuntimeError("no engine is left")
            return await super().generate(token_ids, params, session_id=session_id)

    manager = bounded(Broken(), 1)
    with pytest.raises(RuntimeError, match="no engine is left"):
        await run(async_loop.train, Schedule(start=0, stop=3), rollouts=manager)


async def test_a_rollout_that_failed_early_does_not_cost_the_checkpoint_of_the_one_before():
    class Broken(FakeGenerator):
        async def generate(self, token_ids, params, *, session_id):  # type: ignore[no-untyped-def]
            raise RuntimeError("rollout 1 fails")

    manager = bounded(Broken(), 1)
    manager.begin(1)
    await asyncio.wait([manager._ahead], timeout=5)
    saved = manager.state_dict()
    again = bounded(FakeGenerator(), 1)
    again.load_state_dict(saved)
    assert [sample.index for sample in (await again.generate(1)).samples] == list(range(12))
    with pytest.raises(RuntimeError, match="rollout 1 fails"):
        await manager.generate(1)


def test_a_version_that_nobody_asked_for_lets_groups_start_too():
    async def main() -> None:
        manager = bounded(generator := FakeGenerator(), 1, continuous=True, batch_size=6)
        manager.synced(1, 0)
        await manager.generate(0)
        manager.begin(1)
        await asyncio.wait_for(manager._ahead, 5)
        before = len(generator.requests)
        manager.advanced(2, 1)
        await asyncio.sleep(10)
        assert len(generator.requests) == before + 12, "a rollout of 3 groups of 4"
        await manager.close()

    on_virtual_clock(main)


async def test_a_rollout_that_nobody_asks_for_ends_with_the_manager():
    manager = bounded(FakeGenerator(), 1)
    manager.begin(1)
    await asyncio.sleep(0)
    await manager.close()
    assert len(asyncio.all_tasks()) == 1


async def test_a_checkpoint_knows_a_rollout_that_is_ready_and_not_trained_on():
    manager = bounded(FakeGenerator(), 1)
    manager.begin(1)
    await asyncio.wait_for(manager._ahead, 5)
    saved = manager.state_dict()
    again = bounded(generator := FakeGenerator(), 1)
    again.load_state_dict(saved)
    expected, found = await manager.generate(1), await again.generate(1)
    assert found.samples == expected.samples and len(found.samples) == 12
    assert generator.requests == [], "nothing is sampled twice"


async def test_a_custom_rollout_that_has_begun_starts_from_where_it_began_after_a_crash():
    source = FakeSource()

    async def collect(rollout_id: int) -> Collected:
        (group,) = source.get_samples(1)
        for sample in group:
            sample.tokens, sample.response_length, sample.reward = [1, 2], 1, 1.0
            sample.status = Sample.Status.COMPLETED
        return Collected(groups=[group])

    manager = make(source=source, collect=collect, source_state=lambda: source.drawn)[0]
    await manager.generate(0)
    assert manager.source_before is None
    manager.begin(1)
    manager.synced(1, 1)
    await asyncio.wait_for(manager._ahead, 5)
    assert (source.drawn, manager.source_before) == (2, 1)
    assert manager.state_dict()["groups"] == []
    await manager.generate(1)
    assert manager.source_before is None
