"""How rollouts end: with groups that had better been others, with an error, with functions that will not end."""

import asyncio
import itertools
import logging

import pytest

from tests.rollout.fakes import FakeSource
from tests.rollout.worlds import on_virtual_clock
from vime.errors import UserError
from vime.plugins.answers import Kept
from vime.rollout.sampling import TELL_S, InFlight, Sampler
from vime.rollout.staleness import StalenessBound
from vime.rollout.tasks import CANCEL_S
from vime.types import Group, Sample, Status


def answered(sample: Sample) -> Sample:
    done = sample.copy()
    done.tokens, done.response_length, done.status, done.weight_versions = [1, 2], 1, Status.COMPLETED, [1]
    return done


def running_ahead(run, max_staleness: int = 2, **options) -> Sampler:  # type: ignore[no-untyped-def]
    """Rollouts of two groups."""
    bound = StalenessBound(max_staleness=max_staleness, batch_size=2, runs_ahead=True)
    bound.history.synced(1, 0)
    return Sampler(FakeSource(n=1), run, in_flight=InFlight.LEAVE, bound=bound, **{"batch_size": 6} | options)


async def at_once(group: Group, rollout_id: int) -> Group:
    group[:] = [answered(sample) for sample in group]
    return group


# --- too few groups count -----------------------------------------------------------------------------------


def may_fill(group: Group) -> Kept:
    return Kept(keep=False, reason="dull", keep_when_insufficient=True)


@pytest.mark.parametrize("continuous", [True, False])
def test_spare_groups_fill_a_batch_when_those_that_were_under_way_have_ended(continuous):
    """Not only when nothing is under way, which without a pause is by chance."""
    number = itertools.count()

    async def run(group: Group, rollout_id: int) -> Group:
        await asyncio.sleep(1 + next(number) % 7)
        return await at_once(group, rollout_id)

    async def live() -> tuple[int, int, float]:
        sampler = running_ahead(run, judge=may_fill, continuous=continuous, batch_size=6 if continuous else 2)
        collected = await sampler.collect(0, 2)
        drawn = sampler.ledger.drawn
        await sampler.close()
        return drawn, len(collected.dropped), asyncio.get_running_loop().time()

    # six take 1 to 6 s; three more start meanwhile and are left to the next rollout
    assert on_virtual_clock(live) == ((9, 4, 6.0) if continuous else (2, 0, 2.0))


def test_the_flag_that_is_named_is_the_one_that_was_given():
    async def live() -> None:
        sampler = running_ahead(at_once, judge=lambda group: Kept(keep=False), continuous=True, max_refills=1)
        await sampler.collect(0, 2)

    with pytest.raises(UserError, match=r"\(--max-refill-rounds 1 x --max-groups-ahead 6\)"):
        on_virtual_clock(live)


# --- errors -------------------------------------------------------------------------------------------------


def test_after_an_error_the_state_has_what_was_kept_what_was_judged_and_what_was_under_way():
    async def run(group: Group, rollout_id: int) -> Group:
        await asyncio.sleep(group[0].group_index or 0)
        if group[0].group_index == 2:
            raise RuntimeError("a hook failed")
        return await at_once(group, rollout_id)

    async def live() -> list[tuple[int, str]]:
        sampler = running_ahead(run, batch_size=4, judge=lambda group: Kept(keep=group[0].group_index != 1))
        with pytest.raises(RuntimeError, match="a hook failed"):
            await sampler.collect(0, 2)
        state = sampler.state_dict()
        assert state["ledger"]["drawn"] == 4 and state["ledger"]["dropped"] == {"unnamed": 1}
        return [(sample["index"], sample["status"]) for group in state["groups"] for sample in group]

    assert on_virtual_clock(live) == [(0, "completed"), (2, "pending"), (3, "pending")]


def test_a_group_that_a_filter_fails_on_is_not_lost():
    def broken(group: Group) -> Kept:
        raise RuntimeError("the filter failed")

    async def live() -> list[int]:
        sampler = running_ahead(at_once, batch_size=2, judge=broken)
        with pytest.raises(RuntimeError, match="the filter failed"):
            await sampler.collect(0, 2)
        return [sample["index"] for group in sampler.state_dict()["groups"] for sample in group]

    assert on_virtual_clock(live) == [0, 1]


def test_what_no_checkpoint_can_hold_is_told_when_its_group_is_judged_and_spoils_no_checkpoint():
    async def run(group: Group, rollout_id: int) -> Group:
        await at_once(group, rollout_id)
        await asyncio.sleep(1)
        group[0].metadata["seen"] = {1, 2}
        return group

    async def live() -> list[str]:
        sampler = running_ahead(run, batch_size=2)
        with pytest.raises(UserError, match="metadata cannot be kept in a checkpoint"):
            await sampler.collect(0, 2)
        return [sample["status"] for group in sampler.state_dict()["groups"] for sample in group]

    assert on_virtual_clock(live) == ["pending", "pending"], "they begin anew"


# --- functions that do not end ------------------------------------------------------------------------------


async def never(group: Group, rollout_id: int) -> Group:
    while True:
        try:
            await asyncio.sleep(300)
        except asyncio.CancelledError:
            if rollout_id < 0:
                raise
            rollout_id = -1 if asyncio.get_running_loop().time() > 1000 else rollout_id


def test_what_catches_its_cancellation_holds_up_neither_an_end_nor_a_rollout(caplog):
    async def run(group: Group, rollout_id: int) -> Group:
        return await (never if group[0].group_index == 1 else at_once)(group, rollout_id)

    async def live() -> tuple[float, list[list[int | None]]]:
        source = FakeSource(n=1)
        sampler = Sampler(source, run, batch_size=2, in_flight=InFlight.ABORT)
        await sampler.collect(0, 1)
        took = asyncio.get_running_loop().time()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.sleep(1001)
        for task in left:
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        return took, [[sample.index for sample in group] for group in source.returned]

    assert on_virtual_clock(live) == (CANCEL_S, [[1]])
    assert "group 1 is left behind" in caplog.text


def test_a_rollout_that_waits_long_says_for_what(caplog):
    async def run(group: Group, rollout_id: int) -> Group:
        await asyncio.sleep(2.5 * TELL_S if group[0].group_index == 3 else 1)
        return await at_once(group, rollout_id)

    async def live() -> None:
        sampler = Sampler(FakeSource(n=1), run, batch_size=4)
        await sampler.collect(7, 4)

    with caplog.at_level(logging.WARNING):
        on_virtual_clock(live)
    assert [record.message for record in caplog.records] == [
        "rollout 8: nothing has ended for 600 s; under way: group 3"
    ] * 2
