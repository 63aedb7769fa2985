"""All processes of a run, and the collaborators of the loop around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vime.checkpoints import CheckpointStore
from vime.cluster.checkpoints import GroupCheckpoints
from vime.cluster.engine_group import EngineGroup
from vime.cluster.placement import Placement
from vime.cluster.record import Record
from vime.cluster.session import Slots
from vime.cluster.train_group import TrainGroup
from vime.cluster.turns import Turns
from vime.cluster.weights import GroupWeightSync
from vime.config import Config
from vime.config.layouts import Layout
from vime.data.batching import make_train_batches
from vime.loop import Schedule
from vime.models import load_shape
from vime.ports import Checkpoints
from vime.rewards.hub import RewardHub
from vime.rollout.build import Prompts, make_hub, make_manager, make_pool
from vime.rollout.tasks import together
from vime.serving.client import RouterClient
from vime.serving.control import EngineControl
from vime.types import RolloutBatch, TrainBatch


class NoCheckpoints:
    """Implements ``ports.Checkpoints`` for runs without --save; its schedule never saves."""

    async def save(self, rollout_id: int) -> Path:
        raise AssertionError("a run without --save has nothing to save")


class Job:
    """Started once, stopped once. ``schedule``, ``rollouts``, ``weights`` and ``checkpoints`` exist after ``start``."""

    def __init__(self, config: Config, prompts: Prompts, record: Record, slots: Slots) -> None:
        self._config = config
        self._prompts = prompts
        self._record = record
        placement = Placement(config, slots)
        self.trainer = TrainGroup(
            config, placement, slots.threads, lambda batch, dp_size: split(batch, dp_size, config)
        )
        on_gpus = slots.kind == "GPU"
        self.turns = Turns(
            self.trainer,
            trainer_leaves=on_gpus and config.cluster.offload_train,
            engines_sleep=on_gpus and config.cluster.offload_rollout,
        )
        self._engines = EngineGroup(config, placement, slots.threads, Path(config.ops.run_dir) / "logs")
        self._pool = make_pool(config)
        self._client: RouterClient | None = None
        self._hub: RewardHub | None = None
        self._controls: list[EngineControl] = []

    async def start(self) -> None:
        """Starts trainer, engines and graders, then puts together what the loop needs."""
        config = self._config
        if self.turns.engines_sleep:  # a starting engine wants all the memory that it will ever have
            await together([self._start_engines(), self._pool.start()])
            await self._start_trainer()
        else:
            await together([self._start_trainer(), self._start_engines(), self._pool.start()])
        self._client = RouterClient(
            self._engines.router_url, self._controls, request_timeout_s=config.engine.request_timeout_s
        )
        router = urlsplit(self._engines.router_url)
        args = config.args.extended(vllm_router_ip=router.hostname, vllm_router_port=router.port)
        self._hub = make_hub(config, self._prompts, args, self._pool)
        self.weights = weights = GroupWeightSync(
            config,
            self.trainer,
            self._controls,
            self.turns,
            probe_prompt=self._prompts.probe_prompt(),
            version=self._saved_version() - 1,
        )
        self.rollouts = make_manager(
            config, self._prompts, args, self._client, self._hub, self._record.recorder, lambda: weights.version
        )
        self.schedule = self._make_schedule()
        self.checkpoints = self._make_checkpoints()

    async def _start_engines(self) -> None:
        await self._engines.start()
        self._controls = [EngineControl(url, f"engine {i}") for i, url in enumerate(self._engines.urls)]
        await self.turns.engines_started(self._controls)

    async def _start_trainer(self) -> None:
        info = await self.trainer.start()
        given = self._config.checkpoint.start_rollout_id
        self._start = info.start_rollout_id if given is None else given
        state = info.state
        if state is not None:
            self._restore_source(state["source"])
        self._state = state or {}

    def _restore_source(self, saved: Any) -> None:
        load = getattr(self._prompts.source, "load_state_dict", None)
        if load is not None and saved is not None:
            load(saved)
        elif hasattr(self._prompts.source, "load"):
            self._prompts.source.load(self._start - 1)

    def _save_source(self, rollout_id: int) -> Any:
        source = self._prompts.source
        if hasattr(source, "state_dict"):
            return source.state_dict()
        if hasattr(source, "save"):  # a user's data source keeps its own files
            source.save(rollout_id)
        return None

    def _saved_version(self) -> int:
        """The first sync of a resumed run brings the very weights that this version had."""
        return int(self._state.get("weight_version", 1))

    def _make_schedule(self) -> Schedule:
        config = self._config
        return Schedule(
            start=self._start,
            stop=self._prompts.num_rollout(config),
            save_interval=config.checkpoint.save_interval,
            saves_at_end=config.checkpoint.save is not None,
            eval_interval=config.evaluation.eval_interval,
            evaluates_first=(
                config.evaluation.eval_interval is not None
                and self._start == 0
                and not config.evaluation.skip_eval_before_train
            ),
        )

    def _make_checkpoints(self) -> Checkpoints:
        checkpoint = self._config.checkpoint
        if checkpoint.save is None:
            return NoCheckpoints()
        return GroupCheckpoints(CheckpointStore(checkpoint.save), self.turns, self._driver_state, checkpoint.save_hf)

    def _driver_state(self, rollout_id: int) -> dict[str, Any]:
        return {
            "source": self._save_source(rollout_id),
            "weight_version": self.weights.version,
            **self._record.driver_state(),
        }

    async def failures(self) -> list[str]:
        """What is wrong with engines and router; empty while all is well."""
        return await self._engines.failures()

    async def stop(self) -> None:
        """Ends everything that was started; never raises."""
        await self._pool.close()
        if self._hub is not None:
            await self._hub.close()
        if self._client is not None:
            await self._client.close()
        for control in self._controls:
            await control.close()
        await self._engines.stop()
        await self.trainer.stop()


def split(batch: RolloutBatch, dp_size: int, config: Config) -> list[TrainBatch]:
    """One share of the batch for each data-parallel rank."""
    sizes, layout = config.batch, Layout.of(config, load_shape(config.checkpoint.hf_checkpoint))
    return make_train_batches(
        batch,
        dp_size=dp_size,
        global_batch_size=sizes.global_batch_size,
        micro_batch_size=sizes.micro_batch_size,
        use_dynamic_batch_size=sizes.use_dynamic_batch_size,
        max_tokens_per_gpu=sizes.max_tokens_per_gpu,
        balance_data=sizes.balance_data,
        cp_size=layout.context,
        micro_batch_multiple=layout.micro_batch_multiple,
    )
