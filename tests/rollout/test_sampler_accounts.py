"""Whatever finishes first, is dropped, fails or is interrupted: every sample is accounted for exactly once."""

import asyncio
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.worlds import PROMPT, Driver, InFlight, World, on_virtual_clock, token_of
from vime.errors import EngineError, UserError
from vime.plugins.answers import Kept
from vime.rollout.staleness import StalenessBound
from vime.types import Status

TARGET = 3
WORLDS = st.builds(
    World,
    seed=st.integers(0, 10**6),
    times=st.integers(0, 10**6),
    failing=st.sampled_from([0.0, 0.0, 0.1, 0.4]),
    filtered=st.booleans(),
)
SAMPLERS = st.fixed_dictionaries(
    {
        "in_flight": st.sampled_from(InFlight),
        "in_order": st.booleans(),
        "batch_size": st.integers(TARGET, 3 * TARGET),
    }
)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "label": "1"}) + "\n" for i in range(11)))
    return path


def indices(groups):
    return [sample.index for group in groups for sample in group]


def check_answer(world, sample):
    """The whole answer, each token once, with the version that sampled it; or a failure."""
    if sample.status is Status.FAILED:
        return
    count = world.length(sample.index)
    assert sample.status is Status.COMPLETED
    assert sample.tokens == PROMPT + [token_of(sample.index, place) for place in range(count)]
    assert sample.rollout_log_probs == [-float(version) for version in sample.weight_versions]
    assert len(sample.weight_versions) == count and sample.weight_versions == sorted(sample.weight_versions)
    assert sample.reward == sample.index % 2


@settings(max_examples=25)
@given(world=WORLDS, options=SAMPLERS)
def test_every_sample_is_trained_dropped_waiting_or_in_flight_exactly_once(prompts, world, options):
    async def live():
        driver = Driver(world, prompts, requeues=3, **options)
        found = [await driver.collect(rollout_id, TARGET) for rollout_id in range(4)]
        state, ledger, metrics = driver.state(), driver.sampler.ledger, [each.metrics for each in found]
        await driver.sampler.close()
        return found, state, ledger, metrics

    found, state, ledger, metrics = on_virtual_clock(live)
    for collected in found:
        assert len(collected.groups) == TARGET
        assert indices(collected.groups) == sorted(indices(collected.groups))
        for sample in (sample for group in collected.groups for sample in group):
            check_answer(world, sample)

    trained = [index for each in found for index in indices(each.groups)]
    dropped = [index for each in found for index in indices(drop.group for drop in each.dropped)]
    in_flight = [sample["index"] for group in state["sampler"]["groups"] for sample in group]
    waiting = [sample["index"] for group in state["source"]["buffer"] for sample in group]
    everything = Counter(trained + dropped + in_flight + waiting)
    assert everything == Counter(range(state["source"]["next_index"])), "none is lost, and none is there twice"

    reasons = Counter(drop.reason for each in found for drop in each.dropped)
    assert ledger.dropped == reasons and ledger.trained == 4 * TARGET
    assert ledger.in_flight == len(state["sampler"]["groups"])
    assert sum(each["rollout/groups/drawn"] for each in metrics) == ledger.drawn
    assert sum(each["rollout/groups/dropped"] for each in metrics) == reasons.total()


@settings(max_examples=25)
@given(world=WORLDS, batch_size=st.integers(TARGET, 3 * TARGET))
def test_an_interrupted_answer_is_continued_token_by_token_and_never_sampled_or_graded_twice(
    prompts, world, batch_size
):
    world.failing = 0.0

    async def live():
        driver = Driver(world, prompts, in_flight=InFlight.ABORT, batch_size=batch_size)
        return [await driver.collect(rollout_id, TARGET) for rollout_id in range(4)], driver.state()

    found, state = on_virtual_clock(live)
    assert set(world.sampled.values()) <= {1}
    assert set(world.graded.values()) <= {1}
    for sample in (sample for group in state["source"]["buffer"] for sample in group):
        count = sample["response_length"]
        assert sample["tokens"][3:] == [token_of(sample["index"], place) for place in range(count)]
        assert ("start_rollout_id" in sample["metadata"]) == (count > 0)
    for sample in (sample for each in found for group in each.groups for sample in group):
        assert sample.metadata.get("start_rollout_id", sample.rollout_id) <= sample.rollout_id


@settings(max_examples=25)
@given(world=WORLDS, batch_size=st.integers(TARGET, 3 * TARGET))
def test_without_partial_rollouts_no_answer_mixes_versions_and_indices_are_kept(prompts, world, batch_size):
    async def live():
        driver = Driver(world, prompts, requeues=3, in_flight=InFlight.RESTART, batch_size=batch_size)
        return [await driver.collect(rollout_id, TARGET) for rollout_id in range(4)], driver.state()

    found, state = on_virtual_clock(live)
    for sample in (sample for each in found for group in each.groups for sample in group):
        assert len(set(sample.weight_versions)) <= 1
    for group in state["source"]["buffer"]:
        ended = {sample["status"] for sample in group}
        assert ended == {"pending"} or "pending" not in ended, "all of a group is fresh, or all of it is there"


@settings(max_examples=25)
@given(world=WORLDS, times=st.integers(0, 10**6), batch_size=st.integers(TARGET, 3 * TARGET), stop=st.integers(0, 2))
def test_a_deterministic_rollout_depends_on_nothing_that_takes_time_and_survives_a_restart(
    prompts, world, times, batch_size, stop
):
    world.failing = 0.0
    options = {"in_flight": InFlight.FINISH, "in_order": True, "batch_size": batch_size}

    async def live(times, until, state=None, first=0):
        driver = Driver(World(seed=world.seed, times=times, filtered=world.filtered), prompts, **options)
        driver.world.version = first + 1
        if state is not None:
            driver.load(state)
        return [plain(await driver.collect(k, TARGET)) for k in range(first, until)], driver.state()

    whole, end = on_virtual_clock(lambda: live(world.times, 4))
    begun, state = on_virtual_clock(lambda: live(times, stop + 1))
    rest, other_end = on_virtual_clock(lambda: live(times + 1, 4, state, stop + 1), seed=1)
    assert begun + rest == whole
    assert end == other_end


def plain(collected):
    return (
        [[(sample.index, sample.tokens, sample.weight_versions) for sample in group] for group in collected.groups],
        sorted((drop.group[0].group_index, drop.reason) for drop in collected.dropped),
        dict(collected.metrics),
    )


@settings(max_examples=25)
@given(world=WORLDS, options=SAMPLERS, after=st.floats(0, 20))
def test_a_checkpoint_in_the_middle_of_a_rollout_loses_nothing(prompts, world, options, after):
    """Taken at any time: what was finished stays, what was in flight goes on from what it had."""

    async def first_life():
        driver = Driver(world, prompts, requeues=3, **options)
        found = [await driver.collect(0, TARGET)]
        rollout = asyncio.ensure_future(driver.collect(1, TARGET))
        await asyncio.wait([rollout], timeout=after)
        if rollout.done():
            found.append(rollout.result())
        state = driver.state()
        rollout.cancel()
        await asyncio.gather(rollout, return_exceptions=True)
        await driver.sampler.close()
        return found, state

    found, state = on_virtual_clock(first_life)

    async def second_life():
        driver = Driver(world, prompts, requeues=3, **options)
        driver.load(state)
        more = [await driver.collect(k, TARGET) for k in range(len(found), 3)]
        end = driver.state()
        await driver.sampler.close()
        return more, end

    more, end = on_virtual_clock(second_life)
    for sample in (sample for each in more for group in each.groups for sample in group):
        check_answer(world, sample)
    closed = indices(group for each in found + more for group in each.groups)
    waiting = [sample["index"] for group in end["sampler"]["groups"] + end["source"]["buffer"] for sample in group]
    assert not [index for index, count in Counter(closed + waiting).items() if count > 1]
    assert end["sampler"]["ledger"]["trained"] == 3 * TARGET
    dropped = sum(end["sampler"]["ledger"]["dropped"].values())
    counted = (
        end["sampler"]["ledger"]["trained"]
        + dropped
        + end["sampler"]["ledger"]["returned"]
        + len(end["sampler"]["groups"])
    )
    assert counted == end["sampler"]["ledger"]["drawn"]
    missing = set(range(end["source"]["next_index"])) - set(closed + waiting)
    assert len(missing) == 3 * dropped, "what is neither trained nor waiting was dropped, and counted"


def test_a_filter_that_drops_everything_ends_with_the_reasons(prompts):
    class Strict(World):
        def verdict(self, group):
            return Kept(keep=False, reason="zero_std_0.0" if group[0].group_index % 3 else "zero_std_1.0")

    async def live():
        driver = Driver(Strict(), prompts, batch_size=4, max_refills=2)
        with pytest.raises(UserError) as caught:
            await driver.collect(5, TARGET)
        return str(caught.value)

    assert on_virtual_clock(live) == (
        "rollout 6: 12 groups were generated and 0 of the 3 needed were kept; 8 fell because zero_std_0.0, 4 fell "
        "because zero_std_1.0 (--max-refill-rounds 2 x --over-sampling-batch-size 4)"
    )


def test_an_engine_failure_ends_the_run_unless_it_is_tolerated(prompts):
    async def live():
        driver = Driver(World(failing=1.0), prompts, batch_size=3)
        with pytest.raises(EngineError, match="engine 0 is gone"):
            await driver.collect(0, TARGET)

    on_virtual_clock(live)


def test_answers_that_no_engine_lives_to_finish_fail_and_their_groups_are_counted(prompts):
    async def live():
        driver = Driver(World(failing=1.0), prompts, batch_size=3, requeues=2, max_refills=1)
        with pytest.raises(UserError, match=r"6 groups were generated .* 6 fell because failed"):
            await driver.collect(0, TARGET)
        return driver.runner.pop_metrics()

    assert on_virtual_clock(live) == {
        "rollout/samples/continued": 0.0,
        "rollout/samples/requeued": 36.0,
        "rollout/samples/given_up": 18.0,
    }


def test_an_abort_does_not_wait_for_a_slow_grader(prompts):
    """Answers that are complete go back ungraded and are graded next time."""

    class Slow(World):
        async def reward(self, sample, *, evaluation=False):
            if sample.reward is None and sample.group_index == 0 and self.version == 1:
                await asyncio.sleep(3600)
            await super().reward(sample)

    async def live():
        driver = Driver(Slow(filtered=False), prompts, in_flight=InFlight.ABORT, batch_size=TARGET + 1)
        clock = asyncio.get_running_loop().time
        first = await driver.collect(0, TARGET)
        took = clock()
        waiting = driver.state()["source"]["buffer"]
        second = await driver.collect(1, TARGET)
        return took, first, waiting, second

    took, first, (group,), second = on_virtual_clock(live)
    assert took < 60
    assert [each[0].group_index for each in first.groups] == [1, 2, 3]
    assert {sample["status"] for sample in group} == {"completed"} and group[0]["reward"] is None
    assert second.groups[0][0].group_index == 0 and second.groups[0][0].weight_versions[0] == 1


def test_admission_holds_groups_back_until_it_is_asked_again(prompts):
    class Doled(StalenessBound):
        allowed = 0

        def may_start(self, rollout_id, places, deadlines):
            return Doled.allowed - (TARGET - places) - len(deadlines)

    async def live():
        driver = Driver(World(filtered=False), prompts, batch_size=TARGET, bound=Doled())
        rollout = asyncio.ensure_future(driver.collect(0, TARGET))
        await asyncio.sleep(100)
        assert not rollout.done() and driver.sampler.ledger.drawn == 0
        for _ in range(TARGET):
            Doled.allowed += 1
            driver.sampler.admission_changed()
            await asyncio.sleep(100)
            assert driver.sampler.ledger.drawn == Doled.allowed
        return (await rollout).groups

    assert [group[0].group_index for group in on_virtual_clock(live)] == [0, 1, 2]
