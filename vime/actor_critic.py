"""PPO's two models behind one verb, so that a training loop is the same with a critic and without one.

Before any weight moves both models say what they think of a rollout's tokens: the critic its values; the actor, where
the KL divergence is part of the reward, its log-probs and those of the reference. From these scores, which travel with
the samples, each model computes the same advantages, and so neither has to wait for the other to learn.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from vime.ports import ScoringTrainer
from vime.rollout.tasks import together
from vime.types import RolloutBatch, TrainResult

__all__ = ["ActorCritic"]

T = TypeVar("T")


class ActorCritic:
    """Implements ``ports.Trainer``.

    Args:
        actor_scores: whether advantages depend on the actor's log-probs.
        actor_from: the first rollout in which the actor learns too.
        share_devices: whether the models take turns; otherwise they compute at the same time.
    """

    def __init__(
        self,
        actor: ScoringTrainer,
        critic: ScoringTrainer,
        *,
        actor_scores: bool,
        actor_from: int = 0,
        share_devices: bool = False,
    ) -> None:
        self._actor, self._critic = actor, critic
        self._actor_scores, self._actor_from = actor_scores, actor_from
        self._run = _in_turn if share_devices else _at_once

    async def train(self, batch: RolloutBatch) -> TrainResult:
        """The metrics of both, step by step."""
        scoring = [self._actor, self._critic] if self._actor_scores else [self._critic]
        for scores in await self._run([partial(model.score, batch) for model in scoring]):
            batch = batch.with_scores(scores)
        # the critic has just had its turn; and after the last one, the actor's weights are where the engines get them
        learning = [self._critic] if batch.rollout_id < self._actor_from else [self._critic, self._actor]
        return _joined(await self._run([partial(model.train, batch) for model in learning]))


async def _at_once(calls: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    return await together([call() for call in calls])


async def _in_turn(calls: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    return [await call() for call in calls]


def _joined(results: Sequence[TrainResult]) -> TrainResult:
    """All metrics of each step; the models take the same steps, and call their metrics differently."""
    steps = zip(*(result.steps for result in results), strict=True)
    return TrainResult(
        steps=tuple({name: value for metrics in of_step for name, value in metrics.items()} for of_step in steps),
        memory={name: size for result in results for name, size in result.memory.items()},
    )
