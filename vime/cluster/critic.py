"""The critic of a run: its processes, its devices, and its part of training and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vime.actor_critic import ActorCritic
from vime.checkpoints import CheckpointStore
from vime.cluster.actors import CriticActor
from vime.cluster.checkpoints import CriticCheckpoints
from vime.cluster.placement import Placement
from vime.cluster.train_group import TrainGroup
from vime.cluster.training_job import split
from vime.cluster.turns import Guest, Turns
from vime.config import Config
from vime.config.roles import critic_config
from vime.types import RolloutBatch

__all__ = ["FIRST_ROLLOUT", "Critic", "first_rollout"]

FIRST_ROLLOUT = "critic_first_rollout"
"""What a checkpoint calls it."""


class Critic:
    """Started once, stopped once.

    Args:
        turns: the actor, whose devices the critic shares under --colocate-critic.
    """

    def __init__(self, config: Config, placement: Placement, threads: int, turns: Turns) -> None:
        self._config, self._turns = config, turns
        own = critic_config(config)
        self._group = TrainGroup(
            own,
            placement.critic_rank,
            threads,
            lambda batch, dp_size: split(without_routes(batch), dp_size, own),
            CriticActor,
        )
        self.shares_devices = config.cluster.colocate_critic
        self._model: TrainGroup | Guest = turns.guest(self._group) if self.shares_devices else self._group
        save = config.critic.critic_save
        self.checkpoints = CriticCheckpoints(self._model, None if save is None else CheckpointStore(save))

    async def start(self) -> None:
        """Builds and loads the model; on shared devices it then makes room for the actor."""
        info = await self._group.start()
        self.is_new = info.resumed_from is None
        if isinstance(self._model, Guest):
            await self._model.started()

    def with_actor(self, first_rollout: int) -> ActorCritic:
        """What the training loop trains.

        Args:
            first_rollout: of the critic.
        """
        hooks = self._config.hooks
        return ActorCritic(
            self._turns,
            self._model,
            actor_scores=self._config.algorithm.kl_coef != 0 or hooks.custom_advantage_function_path is not None,
            actor_from=first_rollout + self._config.critic.num_critic_only_steps,
            share_devices=self.shares_devices,
        )

    async def stop(self) -> None:
        """Never raises."""
        await self._group.stop()


def without_routes(batch: RolloutBatch) -> RolloutBatch:
    """The same samples for a critic, which routes for itself: routes are most of what a batch holds."""
    return replace(batch, samples=tuple(replace(sample, routed_experts=None) for sample in batch.samples))


def first_rollout(start: int, resumed: Mapping[str, Any] | None) -> int:
    """The first rollout that a critic learns from, or has learnt from, which need not be the run's: an actor that has
    learnt without one can go on with one.

    Args:
        start: where the run starts now.
        resumed: what the checkpoint says that the critic goes on from; None: it is new.
    """
    return start if resumed is None else int(resumed.get(FIRST_ROLLOUT, 0))
