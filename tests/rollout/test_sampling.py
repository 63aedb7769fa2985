"""The sampling loop loses nothing, leaves nothing running, and does not depend on who finishes first."""

import asyncio

import pytest

from tests.rollout.fakes import FakeSource
from vime.plugins.answers import Kept
from vime.rollout.sampling import Sampler
from vime.rollout.tasks import together
from vime.types import Group


async def finish_in_reverse(group: Group, rollout_id: int = 0) -> Group:
    await asyncio.sleep(0.02 - group[0].group_index / 1000)
    return group


async def test_groups_come_back_in_the_order_in_which_they_were_drawn():
    collected = await Sampler(FakeSource(), finish_in_reverse, batch_size=8).collect(0, 8)
    assert [group[0].group_index for group in collected.groups] == list(range(8))


async def test_a_dropped_group_is_replaced_by_a_fresh_one():
    def judge(group):
        return Kept(keep=group[0].group_index % 2 == 0, reason="odd")

    source = FakeSource()
    collected = await Sampler(source, finish_in_reverse, batch_size=3, judge=judge).collect(0, 3)
    kept = [group[0].group_index for group in collected.groups]
    dropped = [(each.group[0].group_index, each.reason) for each in collected.dropped]
    returned = [group[0].group_index for group in source.returned]
    assert len(kept) == 3 and all(index % 2 == 0 for index in kept)
    assert {reason for _, reason in dropped} == {"odd"}
    everything = kept + [index for index, _ in dropped] + returned
    assert sorted(everything) == list(range(source.drawn)), "every group drawn is accounted for"


async def test_a_checkpoint_in_the_middle_of_a_rollout_knows_what_was_dropped_by_then():
    async def run(group: Group, rollout_id: int) -> Group:
        await asyncio.sleep(0 if group[0].group_index < 2 else 60)
        return group

    judged = asyncio.Event()

    def judge(group):
        if group[0].group_index == 1:
            judged.set()
        return Kept(keep=group[0].group_index != 1, reason="second")

    source = FakeSource()
    sampler = Sampler(source, run, batch_size=3, judge=judge)
    collecting = asyncio.ensure_future(sampler.collect(0, 3))
    await judged.wait()
    state = sampler.state_dict()
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)

    resumed = Sampler(source, finish_in_reverse, batch_size=3)
    resumed.load_state_dict(state)
    collected = await resumed.collect(0, 3)
    assert 1 not in [group[0].group_index for group in collected.groups]
    assert collected.metrics["rollout/groups/dropped/second"] == 1, "it is in no other rollout's metrics"
    assert collected.metrics["rollout/groups/drawn"] == source.drawn


async def test_a_failing_group_ends_the_loop_with_its_own_error_and_cancels_the_rest():
    cancelled = []

    async def run(group: Group, rollout_id: int) -> Group:
        if group[0].group_index == 1:
            raise RuntimeError("engine 0 is gone")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(group[0].group_index)
            raise
        return group

    with pytest.raises(RuntimeError, match="engine 0 is gone"):
        await Sampler(FakeSource(), run, batch_size=4).collect(0, 4)
    assert sorted(cancelled) == [0, 2, 3]
    assert len(asyncio.all_tasks()) == 1, "only the test itself still runs"


async def test_together_returns_results_in_order_and_raises_the_first_failure_as_itself():
    async def value(x: int, delay: float) -> int:
        await asyncio.sleep(delay)
        if x < 0:
            raise KeyError("negative")
        return x

    assert await together([value(1, 0.01), value(2, 0)]) == [1, 2]
    with pytest.raises(KeyError, match="negative"):
        await together([value(1, 60), value(-1, 0)])
