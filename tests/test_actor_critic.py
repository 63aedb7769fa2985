"""The order in which actor and critic are asked and learn. Both are fakes that write down what they are given."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from vime.actor_critic import ActorCritic
from vime.types import RolloutBatch, TokenScores, TrainResult, TrainSample


def sample(index: int) -> TrainSample:
    return TrainSample(
        index=index,
        group_index=0,
        tokens=(1, 2, 3, 4),
        response_length=index + 1,
        loss_mask=(1,) * (index + 1),
        rollout_log_probs=None,
        weight_versions=(),
        raw_reward=1.0,
        reward=1.0,
    )


class Model:
    """Scores with one field, and learns in a step of its own."""

    def __init__(self, name: str, calls: list[str], **steps: float) -> None:
        self.name, self.calls, self.steps = name, calls, steps
        self.seen: RolloutBatch | None = None

    async def score(self, batch: RolloutBatch) -> dict[int, TokenScores]:
        self.calls.append(f"{self.name} scores")
        await asyncio.sleep(0)
        field = {"critic": "values", "actor": "log_probs"}[self.name]
        return {s.index: TokenScores(**{field: (float(s.index),) * s.response_length}) for s in batch.samples}

    async def train(self, batch: RolloutBatch) -> TrainResult:
        self.calls.append(f"{self.name} starts")
        await asyncio.sleep(0)
        self.calls.append(f"{self.name} has learnt")
        self.seen = batch
        return TrainResult(steps=({f"train/{self.name}": 1.0}, {f"train/{self.name}": 2.0}))


BATCH = RolloutBatch(rollout_id=1, samples=tuple(map(sample, range(3))))


async def trained(**options: Any) -> tuple[list[str], TrainResult, Model, Model]:
    calls: list[str] = []
    actor, critic = Model("actor", calls), Model("critic", calls)
    result = await ActorCritic(actor, critic, **{"actor_scores": False, **options}).train(BATCH)
    return calls, result, actor, critic


async def test_both_learn_at_the_same_time_from_values_that_came_before() -> None:
    calls, result, actor, critic = await trained()
    assert calls == ["critic scores", "critic starts", "actor starts", "critic has learnt", "actor has learnt"]
    assert result.steps == ({"train/critic": 1.0, "train/actor": 1.0}, {"train/critic": 2.0, "train/actor": 2.0})
    assert actor.seen is critic.seen is not None
    assert [sample.scores.values for sample in actor.seen.samples] == [(0.0,), (1.0, 1.0), (2.0, 2.0, 2.0)]


async def test_the_actor_is_asked_too_where_the_kl_is_part_of_the_reward() -> None:
    calls, _, _, critic = await trained(actor_scores=True)
    assert calls[:2] == ["actor scores", "critic scores"]
    assert critic.seen is not None
    scores = critic.seen.samples[1].scores
    assert scores == TokenScores(values=(1.0, 1.0), log_probs=(1.0, 1.0))


async def test_on_the_same_devices_each_has_its_turn() -> None:
    calls, _, _, _ = await trained(actor_scores=True, share_devices=True)
    assert calls == [
        *("actor scores", "critic scores"),
        *("critic starts", "critic has learnt", "actor starts", "actor has learnt"),
    ]


@pytest.mark.parametrize(("actor_from", "learns"), [(0, True), (1, True), (2, False)])
async def test_the_actor_does_not_learn_in_the_first_rollouts(actor_from: int, learns: bool) -> None:
    """This is the second rollout."""
    calls, result, _, _ = await trained(actor_from=actor_from)
    assert ("actor starts" in calls) == learns
    assert result.steps[0].keys() == ({"train/critic", "train/actor"} if learns else {"train/critic"})
