"""Staleness is counted in trainings, versions count syncs."""

import asyncio

from vime.rollout.staleness import WeightHistory
from vime.types import Sample


def every_two(*, last: int = 3) -> WeightHistory:
    """Versions 1, 2, 3 … after 0, 2, 4 … trainings."""
    history = WeightHistory()
    for version in range(1, last + 1):
        history.synced(version, 2 * (version - 1))
    return history


def sample(versions, mask=None) -> Sample:  # type: ignore[no-untyped-def]
    return Sample(index=0, weight_versions=versions, loss_mask=mask)


def test_a_sample_is_as_stale_as_its_oldest_trained_token():
    history = every_two()
    assert history.staleness(sample([2, 3, 3]), rollout_id=5) == 3  # version 2 has 2 trainings behind it
    assert history.staleness(sample([2, 3, 3], [0, 1, 1]), rollout_id=5) == 1
    assert history.staleness(sample([3]), rollout_id=4) == 0


def test_without_versions_or_trained_tokens_nothing_is_stale():
    assert every_two().staleness(sample([]), rollout_id=9) == 0
    assert every_two().staleness(sample([1], [0]), rollout_id=9) == 0


def test_an_unknown_version_counts_as_the_one_before_it():
    history = every_two()
    assert [history.trainings_of(version) for version in (0, 1, 3, 4, 99)] == [0, 0, 4, 4, 4]


def test_a_resumed_run_goes_on_counting():
    saved = every_two()
    resumed = WeightHistory()
    resumed.load_state_dict(saved.state_dict())
    resumed.synced(3, 4)  # its first sync brings the weights that had this version
    resumed.synced(4, 5)
    assert (resumed.version, resumed.trainings) == (4, 5)
    assert resumed.staleness(sample([2]), rollout_id=5) == 3


async def test_waiters_hear_of_each_sync():
    history = every_two()
    waiting = asyncio.ensure_future(history.until(lambda: history.trainings >= 8))
    await asyncio.sleep(0)
    history.synced(4, 6)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    history.synced(5, 8)
    await asyncio.wait_for(waiting, 1)


def test_a_restarted_sample_has_its_prompt_and_nothing_of_its_answer():
    drawn = Sample(group_index=3, index=7, prompt="1+1?", label="2", metadata={"level": 1}, session_id="42-7")
    answered = drawn.copy()
    answered.tokens, answered.response, answered.response_length = [5, 6, 9], "2", 1
    answered.weight_versions, answered.rollout_log_probs, answered.loss_mask = [1], [-0.5], [1]
    answered.status, answered.reward = Sample.Status.ABORTED, 1.0
    answered.metadata |= {"start_rollout_id": 4, "multi_turn": {"turns": [[0, 1]], "tool_calls": 3}}
    assert answered.restarted() == drawn, "not even the tokens of its prompt: an agent may begin otherwise next time"
    assert answered.tokens == [5, 6, 9] and answered.metadata["start_rollout_id"] == 4
