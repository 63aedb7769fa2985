"""What every run has: a trainer, a source of data, a schedule, checkpoints; and where a resumed run takes them up."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NoReturn, Protocol

from vime.checkpoints import CheckpointStore
from vime.cluster.actors import ModelActor, TrainActor
from vime.cluster.checkpoints import CriticCheckpoints, GroupCheckpoints
from vime.cluster.placement import Placement
from vime.cluster.record import Record
from vime.cluster.session import Slots
from vime.cluster.train_group import TrainGroup
from vime.cluster.turns import Turns
from vime.config import Config
from vime.config.layouts import Layout
from vime.data.batching import make_train_batches
from vime.data.source import check_group_size
from vime.loop import Schedule
from vime.models import load_shape
from vime.ports import Checkpoints, DataSource, Rollouts, Trainer, WeightSync
from vime.types import RolloutBatch, TrainBatch, WeightVersion


class VersionedSync(WeightSync, Protocol):
    """A weight sync that knows which version was carried last."""

    version: WeightVersion


class NoCheckpoints:
    """Implements ``ports.Checkpoints`` for runs without --save; its schedule never saves."""

    async def save(self, rollout_id: int) -> Path:
        raise AssertionError("a run without --save has nothing to save")


class TrainingJob(ABC):
    """All processes of a run, and the collaborators of the loop around them. Started once, stopped once.

    ``schedule``, ``rollouts``, ``weights`` and ``checkpoints`` exist after ``start``.
    """

    rollouts: Rollouts
    weights: VersionedSync | None = None  # None: nobody else has the trainer's weights
    schedule: Schedule
    checkpoints: Checkpoints

    def __init__(
        self, config: Config, source: DataSource, num_rollout: int, record: Record, trainer: TrainGroup, turns: Turns
    ) -> None:
        self._config = config
        self._source = source
        self._num_rollout = num_rollout
        self._record = record
        self.trainer = trainer
        self.turns = turns

    @abstractmethod
    async def start(self) -> None:
        """Starts the processes, then puts together what the loop needs."""

    @abstractmethod
    async def watch(self) -> NoReturn:
        """Looks after the servers for as long as the run lasts. Raises EngineError when it cannot go on."""

    @abstractmethod
    async def failures(self) -> list[str]:
        """What is wrong with servers; empty while all is well."""

    @property
    def learner(self) -> Trainer:
        """What the training loop trains."""
        return self.turns

    async def stop(self) -> None:
        """Ends everything that was started; never raises."""
        await self.trainer.stop()

    async def _start_trainer(self) -> None:
        info = await self.trainer.start()
        self._start = info.start_rollout_id
        state = info.state
        if state is not None:
            check_group_size(state, self._config.rollout.n_samples_per_prompt)
            self._restore_source(state["source"])
        self._state = state or {}

    def _restore_source(self, saved: Any) -> None:
        load = getattr(self._source, "load_state_dict", None)
        if load is not None and saved is not None:
            load(saved)
        elif hasattr(self._source, "load"):
            self._source.load(self._start - 1)

    def _save_source(self, rollout_id: int) -> Any:
        if hasattr(self._source, "state_dict"):
            return self._source.state_dict()
        if hasattr(self._source, "save"):  # a user's data source keeps its own files
            self._source.save(rollout_id)
        return None

    def _saved_version(self) -> int:
        """The first sync of a resumed run brings the very weights that this version had."""
        return int(self._state.get("weight_version", 1))

    def _make_schedule(self) -> Schedule:
        config, evaluation = self._config, self._config.evaluation
        return Schedule(
            start=self._start,
            stop=self._num_rollout,
            sync_interval=config.asynchrony.update_weights_interval,
            save_interval=config.checkpoint.save_interval,
            saves_at_end=config.checkpoint.save is not None,
            eval_interval=evaluation.eval_interval,
            evaluates_first=(
                evaluation.eval_interval is not None
                and (self._start == 0 or self._num_rollout == 0)  # a checkpoint may be there to be evaluated
                and not evaluation.skip_eval_before_train
            ),
        )

    def _make_checkpoints(self) -> Checkpoints:
        checkpoint = self._config.checkpoint
        if checkpoint.save is None:
            return NoCheckpoints()
        return GroupCheckpoints(
            CheckpointStore(checkpoint.save),
            self.turns,
            self._driver_state,
            checkpoint.save_hf,
            self._critic_checkpoints(),
        )

    def _critic_checkpoints(self) -> CriticCheckpoints | None:
        """The critic's part of a checkpoint, in runs that have one."""
        return None

    def _driver_state(self, rollout_id: int) -> dict[str, Any]:
        return {
            "source": self._save_source(rollout_id),
            "weight_version": self._next_version(rollout_id),
            **self._record.driver_state(),
        }

    def _next_version(self, rollout_id: int) -> WeightVersion:
        """The version that the weights of a checkpoint have once they are synced."""
        return self.weights.version if self.weights is not None else 0


class TrainerJob(TrainingJob):
    """A trainer, and nothing else: no engine, no grader.

    Args:
        actor_class: of each rank.
    """

    def __init__(
        self,
        config: Config,
        source: DataSource,
        num_rollout: int,
        record: Record,
        slots: Slots,
        actor_class: type[ModelActor] = TrainActor,
    ) -> None:
        trainer = TrainGroup(
            config,
            Placement(config, slots).rank,
            slots.threads,
            lambda batch, dp_size: split(batch, dp_size, config),
            actor_class,
        )
        turns = Turns(trainer, trainer_leaves=False, engines_sleep=False)
        super().__init__(config, source, num_rollout, record, trainer, turns)

    async def start(self) -> None:
        await self._start_trainer()
        self.schedule = self._make_schedule()
        self.checkpoints = self._make_checkpoints()

    async def watch(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError("there is nothing that could happen to servers")

    async def failures(self) -> list[str]:
        return []


def batch_options(config: Config) -> dict[str, Any]:
    """How the flags say that samples become micro-batches: arguments of ``data.batching``."""
    sizes, layout = config.batch, Layout.of(config, load_shape(config.checkpoint.hf_checkpoint))
    return {
        "micro_batch_size": sizes.micro_batch_size,
        "use_dynamic_batch_size": sizes.use_dynamic_batch_size,
        "max_tokens_per_gpu": sizes.max_tokens_per_gpu,
        "balance_data": sizes.balance_data,
        "cp_size": layout.context,
        "micro_batch_multiple": layout.micro_batch_multiple,
    }


def split(batch: RolloutBatch, dp_size: int, config: Config) -> list[TrainBatch]:
    """One share of the batch for each data-parallel rank."""
    size = config.batch.global_batch_size
    return make_train_batches(batch, dp_size=dp_size, global_batch_size=size, **batch_options(config))
