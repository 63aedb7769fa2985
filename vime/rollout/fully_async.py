"""Fully asynchronous rollouts: groups are kept in flight without a pause, across rollouts, trainings and syncs.

A rollout takes the first groups that are finished, whenever they started, so a long answer holds up nobody who need not
wait for it. Two things push back: no group starts that could not be trained in time (``StalenessBound``), and at most
``--max-groups-ahead`` are in flight or wait to be taken.

Evaluations have the engines to share with all this and are not part of it: they neither wait for a group nor stop one.
Every group is in the sampler's state from its start to the training that uses it, so a checkpoint accounts for it.
"""

from __future__ import annotations

from typing import Any, NoReturn

from vime.errors import UserError
from vime.ports import DataSource
from vime.rollout.sampling import InFlight, Judge, RunGroup, Sampler
from vime.rollout.staleness import StalenessBound

__all__ = ["continuous_sampler", "generate_rollout"]


def continuous_sampler(
    source: DataSource, run: RunGroup, judge: Judge, bound: StalenessBound, *, groups_ahead: int, max_refills: int
) -> Sampler:
    """The sampler of ``--fully-async``.

    Args:
        groups_ahead: most groups in flight or finished that no rollout has taken.
    """
    return Sampler(
        source,
        run,
        batch_size=groups_ahead,
        judge=judge,
        in_flight=InFlight.LEAVE,
        max_refills=max_refills,
        bound=bound,
        continuous=True,
    )


async def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> NoReturn:
    """The name of ``--fully-async`` where a rollout function is asked for: ``--rollout-function-path
    vime.rollout.fully_async.generate_rollout``. What it names lives as long as the run and has no single call.

    Raises:
        UserError: always.
    """
    raise UserError("vime.rollout.fully_async.generate_rollout is a name for --fully-async and cannot be called")
