"""The synchronous training loop: generate, train, sync, and now and then save and evaluate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from vime.ports import Checkpoints, Rollouts, Trainer, WeightSync
from vime.types import RolloutBatch, TrainResult


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Which rollouts to run, and after which of them to sync, to save and to evaluate."""

    start: int  # the first rollout to run; above 0 on a resumed run
    stop: int  # the first rollout not to run
    sync_interval: int = 1
    save_interval: int | None = None
    saves_at_end: bool = False
    eval_interval: int | None = None
    evaluates_first: bool = False

    def rollouts(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def syncs_after(self, rollout_id: int) -> bool:
        return self._is_last(rollout_id) or _is_due(rollout_id, self.sync_interval)

    def saves_after(self, rollout_id: int) -> bool:
        return (self.saves_at_end and self._is_last(rollout_id)) or _is_due(rollout_id, self.save_interval)

    def evaluates_after(self, rollout_id: int) -> bool:
        return self.eval_interval is not None and (self._is_last(rollout_id) or _is_due(rollout_id, self.eval_interval))

    def _is_last(self, rollout_id: int) -> bool:
        return rollout_id == self.stop - 1


def _is_due(rollout_id: int, interval: int | None) -> bool:
    return interval is not None and (rollout_id + 1) % interval == 0


class Report(Protocol):
    """Where the loop tells what it does: progress display, metrics, TensorBoard."""

    def phase(self, name: str) -> AbstractContextManager[None]: ...

    def evaluated(self, rollout_id: int, metrics: dict[str, float]) -> None: ...

    def trained(self, batch: RolloutBatch, result: TrainResult) -> None: ...


async def train(
    schedule: Schedule,
    rollouts: Rollouts,
    actor: Trainer,
    weights: WeightSync | None,
    checkpoints: Checkpoints,
    report: Report,
) -> None:
    """Runs the schedule. The engines serve the newest weights before anything is sampled; ``weights`` is None where
    there are none.

    A checkpoint of rollout k comes last of all that belongs to k, so that a resumed run has nothing to do again: it
    starts at k + 1, with a sync.
    """
    await sync(weights, rollouts, schedule.start, report)
    if schedule.evaluates_first:
        await evaluate(rollouts, schedule.start, report)

    for rollout_id in schedule.rollouts():
        with report.phase("generate"):
            batch = await rollouts.generate(rollout_id)
        with report.phase("train"):
            result = await actor.train(batch)
        await sync(weights, rollouts, rollout_id + 1, report)
        report.trained(batch, result)
        if schedule.evaluates_after(rollout_id):
            await evaluate(rollouts, rollout_id + 1, report)
        if schedule.saves_after(rollout_id):
            await save(checkpoints, rollout_id, report)


async def sync(weights: WeightSync | None, rollouts: Rollouts, trainings: int, report: Report) -> None:
    """Gives the engines the trainer's weights, which have so many trainings behind them."""
    if weights is not None:
        with report.phase("sync"):
            rollouts.synced(await weights.sync(), trainings)


async def evaluate(rollouts: Rollouts, rollout_id: int, report: Report) -> None:
    """Before that rollout, under the weights that the engines have."""
    with report.phase("evaluate"):
        report.evaluated(rollout_id, await rollouts.evaluate(rollout_id))


async def save(checkpoints: Checkpoints, rollout_id: int, report: Report) -> None:
    with report.phase("save"):
        await checkpoints.save(rollout_id)
