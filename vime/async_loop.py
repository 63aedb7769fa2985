"""The asynchronous training loop: while one rollout is trained on, the next one is sampled."""

from __future__ import annotations

from vime.loop import Report, Schedule, evaluate, save, sync
from vime.ports import Checkpoints, Rollouts, Trainer, WeightSync


async def train(
    schedule: Schedule,
    rollouts: Rollouts,
    actor: Trainer,
    weights: WeightSync | None,
    checkpoints: Checkpoints,
    report: Report,
) -> None:
    """Runs the schedule. How far ``rollouts`` runs ahead is its own affair: it knows the bound of staleness, and hears
    of each sync.

    A sync does not wait for the rollout that is being sampled: its requests stay in the engines, halted, and go on with
    the new weights. Nothing is synced during an evaluation, so that one version answers all of it. A checkpoint of
    rollout k comes last of all that belongs to k, and holds what was sampled for k + 1 by then.

    The phase "generate" is the time that training waits for samples.
    """
    await sync(weights, rollouts, schedule.start, report)
    if schedule.evaluates_first:
        await evaluate(rollouts, schedule.start, report)

    for rollout_id in schedule.rollouts():
        with report.phase("generate"):
            batch = await rollouts.generate(rollout_id)
        if rollout_id + 1 < schedule.stop:
            rollouts.begin(rollout_id + 1)
        with report.phase("train"):
            result = await actor.train(batch)
        if schedule.syncs_after(rollout_id):
            await sync(weights, rollouts, rollout_id + 1, report)
        report.trained(batch, result)
        if schedule.evaluates_after(rollout_id):
            await evaluate(rollouts, rollout_id + 1, report)
        if schedule.saves_after(rollout_id):
            await save(checkpoints, rollout_id, report)
