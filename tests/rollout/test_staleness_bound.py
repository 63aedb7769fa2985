"""The bound of staleness, over groups whose durations are made up: what may start, who waits, what comes too late."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import pytest

from tests.rollout.fakes import FakeSource
from tests.simulation.clock import VirtualLoop
from vime.rollout.sampling import Collected, InFlight, Sampler
from vime.rollout.staleness import Policy, StalenessBound, WeightHistory, count_in_time, drop_metrics, in_time
from vime.types import Group, Sample, Status

Duration = Callable[[int], float]
"""group_index → seconds."""

TOKENS = 4


@pytest.mark.parametrize(
    ("deadlines", "places", "fits"),
    [
        ([], 0, True),
        ([7, 7], 2, True),  # this is rollout 7
        ([7, 7, 7], 2, False),
        ([8, 7, 8], 1, True),  # 7 now, both others in the next one
        ([8, 8, 8, 7], 1, False),  # 7 now, but only two places in rollout 8
        ([9, 8, 8, 9, 7], 1, True),
        ([7], 0, False),
    ],
)
def test_groups_fit_if_the_earliest_deadline_first_is_in_time(deadlines, places, fits):
    assert in_time(deadlines, 7, places, batch_size=2) is fits


class Run:
    """A trainer, a generator and a sampler between them, on a virtual clock."""

    def __init__(
        self,
        duration: Duration,
        *,
        policy: Policy = "wait",
        max_staleness: int = 2,
        batch_size: int = 2,
        in_flight: int = 99,
        interval: int = 1,
        train_s: float = 1.0,
    ) -> None:
        self.history = WeightHistory()
        self.bound = StalenessBound(
            history=self.history,
            max_staleness=max_staleness,
            policy=policy,
            batch_size=batch_size,
            runs_ahead=True,
        )
        self.source = FakeSource(n=1)
        self.drawn: list[int] = []
        self.source.get_samples = self._get_samples  # type: ignore[method-assign]
        self.duration, self.interval, self.train_s, self.batch_size = duration, interval, train_s, batch_size
        self.sampler = Sampler(
            self.source, self._answer, batch_size=in_flight, in_flight=InFlight.LEAVE, bound=self.bound, continuous=True
        )
        self.at_once = self.most_at_once = 0
        self.rollouts: list[Collected] = []
        self.times: list[float] = []  # at which each was there

    def _get_samples(self, n: int) -> list[Group]:
        back, self.source.returned = self.source.returned[:n], self.source.returned[n:]
        groups = back + FakeSource.get_samples(self.source, n - len(back))
        self.drawn += [group[0].group_index or 0 for group in groups]
        return groups

    async def _answer(self, group: Group, rollout_id: int) -> Group:
        """Tokens come one after the other, each from the weights of its moment."""
        (sample,) = group
        assert sample.status is Status.PENDING and not sample.weight_versions
        done = sample.copy()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        for _ in range(TOKENS):
            done.weight_versions.append(self.history.version)
            await asyncio.sleep(self.duration(sample.group_index or 0) / TOKENS)
        self.at_once -= 1
        done.tokens, done.response_length, done.status = [1] * (TOKENS + 1), TOKENS, Status.COMPLETED
        group[0] = done
        return group

    async def _train(self, rollouts: int) -> None:
        self.history.synced(1, 0)
        collecting = asyncio.ensure_future(self.sampler.collect(0, self.batch_size))
        for rollout_id in range(rollouts):
            collected = await collecting
            self.times.append(asyncio.get_running_loop().time())
            metrics = self.bound.mask(collected.groups, rollout_id)
            self.rollouts.append(collected)
            assert metrics.get("rollout/staleness/masked_ratio", 0) <= 1
            collecting = asyncio.ensure_future(self.sampler.collect(rollout_id + 1, self.batch_size))
            await asyncio.sleep(self.train_s)
            if (rollout_id + 1) % self.interval == 0:
                self.history.synced(self.history.version + 1, rollout_id + 1)
                self.sampler.admission_changed()
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
        await self.sampler.close()

    def go(self, rollouts: int) -> Run:
        loop = VirtualLoop(1, ends_after=1e5, most_steps=10**6)
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._train(rollouts))
        finally:
            asyncio.set_event_loop(None)
            loop.close()
        return self

    def stalest(self) -> list[int]:
        """Of each rollout."""
        return [
            max(self.history.staleness(s, k) for group in collected.groups for s in group)
            for k, collected in enumerate(self.rollouts)
        ]

    def trained(self) -> list[list[int]]:
        return [[group[0].group_index or 0 for group in collected.groups] for collected in self.rollouts]


def test_so_many_start_as_can_be_trained_in_time():
    run = Run(lambda group: 1e4, max_staleness=2, batch_size=3)

    async def start() -> None:
        run.history.synced(1, 0)
        collecting = asyncio.ensure_future(run.sampler.collect(0, 3))
        await asyncio.sleep(0.1)
        assert len(run.drawn) == 9, "rollouts 0, 1 and 2"
        run.history.synced(2, 1)
        run.sampler.admission_changed()
        await asyncio.sleep(0.1)
        assert len(run.drawn) == 12
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
        await run.sampler.close()

    asyncio.run(start())


def test_the_size_of_the_queue_bounds_it_too():
    assert Run(lambda group: 0.5, in_flight=3).go(6).most_at_once == 3
    assert Run(lambda group: 0.5, in_flight=99).go(6).most_at_once == 6


def test_groups_start_between_rollouts_too():
    """As soon as a sync lets them, though nobody has asked for their rollout yet."""
    run = Run(lambda group: 0.5, max_staleness=1, batch_size=3)

    async def start() -> None:
        run.history.synced(1, 0)
        await run.sampler.collect(0, 3)
        await run.sampler.collect(1, 3)
        run.history.synced(2, 1)
        run.sampler.admission_changed()
        await asyncio.sleep(0.1)
        assert len(run.drawn) == 9, "rollout 2 is sampled while nobody collects it"
        await run.sampler.close()

    asyncio.run(start())


async def test_what_goes_wrong_between_rollouts_ends_the_next_one():
    run = Run(lambda group: 0.01, max_staleness=1, batch_size=3)
    run.history.synced(1, 0)
    for rollout_id in range(2):
        await run.sampler.collect(rollout_id, 3)

    def broken(n: int) -> list[Group]:
        raise RuntimeError("the buffer filter failed")

    run.source.get_samples = broken  # type: ignore[method-assign]
    run.history.synced(2, 1)
    run.sampler.admission_changed()
    await asyncio.sleep(0.05)
    with pytest.raises(RuntimeError, match="the buffer filter failed"):
        await run.sampler.collect(2, 3)


def test_others_overtake_a_straggler_while_it_is_in_time_and_then_training_waits():
    run = Run(lambda group: 6.0 if group == 0 else 0.5, max_staleness=2).go(4)
    assert run.trained()[:2] == [[1, 2], [3, 4]]
    assert 0 in run.trained()[2], "the last rollout that may use weights of no training"
    assert run.times[2] == 6.0
    assert run.stalest()[2] == 2


def test_without_waiting_a_straggler_goes_back_as_a_fresh_prompt():
    run = Run(lambda group: 6.0 if group == 0 else 0.5, policy="drop").go(12)
    (late,) = [group for collected in run.rollouts for group in collected.late]
    assert late[0].group_index == 0 and late[0].response_length == TOKENS
    assert run.drawn.count(0) == 2
    assert max(run.stalest()) <= 2
    assert run.times[3] < 6.0, "nobody waited"
    assert sum(c.metrics["rollout/groups/returned"] for c in run.rollouts) == 1


@pytest.mark.parametrize("policy", ["drop", "mask"])
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_stragglers_that_come_too_late_hold_no_place(policy, max_staleness):
    slow = (0, 1, 5, 6, 9, 10)
    run = Run(
        lambda group: 60.0 if group in slow else 0.5, policy=policy, max_staleness=max_staleness, batch_size=4
    ).go(10)
    assert run.times[-1] < 30, "no rollout waited for any of them"
    assert max(run.stalest()) <= max_staleness


def test_or_its_stale_tokens_are_masked():
    run = Run(lambda group: 6.0 if group == 0 else 0.5, policy="mask").go(12)
    (sample,) = [s for collected in run.rollouts for group in collected.groups for s in group if s.group_index == 0]
    (used,) = [k for k, groups in enumerate(run.trained()) if 0 in groups]
    ages = [used - run.history.trainings_of(version) for version in sample.weight_versions]
    assert max(ages) > 2 and sample.loss_mask == [int(age <= 2) for age in ages]
    assert max(run.stalest()) <= 2


@pytest.mark.parametrize(
    ("policy", "runs_ahead", "late"),
    [("wait", True, True), ("drop", True, True), ("mask", True, False), ("wait", False, False), ("drop", False, True)],
)
def test_what_an_earlier_run_left_too_long_is_sampled_anew(policy, runs_ahead, late):
    bound = StalenessBound(max_staleness=2, policy=policy, runs_ahead=runs_ahead)
    bound.history.synced(1, 3)
    group = [Sample(index=0, weight_versions=[1, 1], response_length=2)]
    assert bound.is_late(group, rollout_id=6) is late
    assert bound.is_late(group, rollout_id=5) is False


@pytest.mark.parametrize(
    ("deadlines", "places", "count"),
    [([7, 7, 7], 2, 2), ([7, 7, 7, 8, 8, 8], 1, 3), ([6, 6], 2, 0), ([6, 8], 0, 1), ([9, 9, 9], 0, 3)],
)
def test_a_place_is_held_for_those_that_can_be_in_time(deadlines, places, count):
    assert count_in_time(deadlines, 7, places, batch_size=2) == count  # this is rollout 7


@pytest.mark.parametrize("policy", ["wait", "drop", "mask"])
@pytest.mark.parametrize("seed", range(40))
def test_no_trained_token_is_staler_than_allowed_and_no_group_is_lost(policy, seed):
    chance = random.Random(seed)
    interval = chance.choice([1, 1, 2, 3])
    max_staleness = interval - 1 + chance.randrange(4) or 1
    slow = chance.choice([0.0, 0.1, 0.5])
    lasting = {group: chance.expovariate(1) + chance.choice([0, 20]) * (chance.random() < slow) for group in range(999)}
    run = Run(
        lasting.__getitem__,
        policy=policy,
        max_staleness=max_staleness,
        batch_size=chance.randint(1, 4),
        in_flight=chance.choice([4, 8, 99]),
        interval=interval,
        train_s=chance.choice([0.1, 1.0, 5.0]),
    ).go(20)
    assert max(run.stalest()) <= max_staleness
    times = Counter(group for groups in run.trained() for group in groups)
    assert len(run.rollouts) == 20 and max(times.values()) == 1
    assert {len(groups) for groups in run.trained()} == {run.batch_size}
    assert policy == "drop" or not any(collected.late for collected in run.rollouts)


def test_what_was_dropped_is_told_with_how_much_longer_it_was():
    def group(length: int) -> Group:
        return [Sample(index=0, response_length=length), Sample(index=1, response_length=length)]

    assert drop_metrics([group(10), group(20), group(30)], [group(60)]) == {
        "rollout/staleness/dropped_ratio": 0.25,
        "rollout/staleness/dropped_length_ratio": 3.0,
    }
    assert drop_metrics([group(10)], []) == {"rollout/staleness/dropped_ratio": 0.0}
