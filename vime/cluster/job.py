"""The job of reinforcement learning: trainer, engines behind a router, and graders."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from vime.cluster.checkpoints import CriticCheckpoints
from vime.cluster.critic import FIRST_ROLLOUT, Critic, first_rollout
from vime.cluster.engine_group import EngineGroup
from vime.cluster.memory import MemoryLedger
from vime.cluster.placement import Placement
from vime.cluster.record import Record
from vime.cluster.session import Slots
from vime.cluster.supervision import HealthChecks, Supervisor
from vime.cluster.train_group import TrainGroup
from vime.cluster.training_job import TrainingJob, split
from vime.cluster.transport import chosen_transport
from vime.cluster.turns import Turns
from vime.cluster.weight_folders import WeightFolders
from vime.cluster.weights import GroupWeightSync
from vime.config import Args, Config
from vime.plugins import rollout as contracts
from vime.ports import Trainer
from vime.rewards.hub import RewardHub
from vime.rollout.build import Prompts, check_endpoint, check_graders, make_hub, make_manager, make_pool, make_rewarder
from vime.rollout.manager import RolloutManager
from vime.rollout.routes import route_shape
from vime.rollout.staleness import WeightHistory
from vime.rollout.tasks import together
from vime.serving.client import RouterClient
from vime.serving.fleet import Fleet
from vime.serving.health import check_generates
from vime.serving.http import EngineError
from vime.serving.teacher import TeacherClient
from vime.types import WeightVersion

HISTORY = "weight_history"
"""What a checkpoint calls it."""


class Job(TrainingJob):
    """Samples answers, grades them and learns from them."""

    def __init__(self, config: Config, prompts: Prompts, record: Record, slots: Slots) -> None:
        placement = Placement(config, slots)
        trainer = TrainGroup(
            config, placement.rank, slots.threads, lambda batch, dp_size: split(batch, dp_size, config)
        )
        on_gpus = slots.kind == "GPU"
        self._transport = chosen_transport(
            config.engine.update_weight_transport,
            trainer_node=placement.node_of_rank(0),
            engine_nodes=[placement.node_of_engine(index) for index in range(config.cluster.num_engines)],
            on_gpus=on_gpus,
            colocate=config.cluster.colocate,
            lasting=config.sampling.use_fault_tolerance or not config.cluster.offload_train,
        )
        turns = Turns(
            trainer,
            trainer_leaves=on_gpus and config.cluster.offload_train,
            engines_sleep=on_gpus and config.cluster.offload_rollout,
            note=record.report.note,
        )
        super().__init__(config, prompts.source, prompts.num_rollout(config), record, trainer, turns)
        self._prompts = prompts
        self._history = WeightHistory()
        self._manager: RolloutManager | None = None
        self._critic = Critic(config, placement, slots.threads, turns) if config.algorithm.needs_critic else None
        self._engines = EngineGroup(config, placement, slots.threads, Path(config.ops.run_dir) / "logs")
        self._fleet = Fleet(self._engines.router, tolerant=config.sampling.use_fault_tolerance)
        self._ledger = MemoryLedger(trainer.memory_gib, self._engines.memory_gib, record.report.note)
        self._pool = make_pool(config)
        self._client: RouterClient | None = None
        self._hub: RewardHub | None = None
        url = config.distillation.opd_teacher_url
        self._teacher = None if url is None else TeacherClient(url, timeout_s=config.engine.request_timeout_s)

    async def start(self) -> None:
        config = self._config
        if self._teacher is not None:  # before anything that takes minutes
            await self._teacher.log_probs(self._prompts.probe_prompt(), 1)
        check_endpoint(config)
        await check_graders(config)
        if self.turns.engines_sleep:  # a starting engine wants all the memory that it will ever have
            await together([self._start_engines(), self._pool.start()])
            await self._start_models()
        else:
            await together([self._start_models(), self._start_engines(), self._pool.start()])
        self._client = RouterClient(
            self._engines.router_url,
            self._fleet,
            request_timeout_s=config.engine.request_timeout_s,
            routes=route_shape(config),
        )
        router = urlsplit(self._engines.router_url)
        args = config.args.extended(vllm_router_ip=router.hostname, vllm_router_port=router.port)
        self._hub = make_hub(config, self._prompts, args, self._pool)
        rewarder = make_rewarder(config, self._prompts, self._hub, self._teacher, EngineError)
        self.rollouts = self._manager = manager = make_manager(
            config, self._prompts, args, self._client, self._hub, self._record.recorder, self._history, rewarder
        )
        if self._state.get("rollouts") is not None:
            manager.load_state_dict(self._state["rollouts"])
        self.weights = weights = GroupWeightSync(
            config,
            self.trainer,
            self._fleet,
            self.turns,
            probe_prompt=self._prompts.probe_prompt(),
            transport=self._transport,
            folders=self._weight_folders(args),
            ledger=self._ledger,
            note=self._record.report.note,
            version=self._saved_version() - 1,
            unscheduled=manager.advanced,
        )
        self._supervisor = Supervisor(
            self._fleet,
            self._engines,
            self._engines.router,
            weights.restore,
            health=health_checks(config),
            room=self.turns.start_of_engine,
            say=self._record.report.say,
        )
        self._record.report.ask(self._fleet.taken_counts)
        self.schedule = self._make_schedule()
        self.checkpoints = self._make_checkpoints()

    def _weight_folders(self, args: Args) -> WeightFolders | None:
        """Where versions are written, if the weights take that way."""
        if self._transport != "disk":
            return None
        engine = self._config.engine
        assert engine.update_weight_disk_dir is not None, "a rule asks for it"
        return WeightFolders(
            Path(engine.update_weight_disk_dir).absolute(),  # trainer and engines may have other working directories
            keep=engine.update_weight_disk_keep_files,
            written=self._prompts.hooks.get(contracts.CUSTOM_UPDATE_WEIGHT_POST_WRITE),
            args=args,
            timeout_s=engine.weight_sync_timeout_s,
        )

    @property
    def learner(self) -> Trainer:
        return self.turns if self._critic is None else self._critic.with_actor(self._critic_first_rollout)

    async def _start_models(self) -> None:
        if self._critic is None:
            await self._start_trainer()
        elif self._critic.shares_devices:
            await self._critic.start()
            await self._start_trainer()
        else:
            await together([self._critic.start(), self._start_trainer()])
        await self.turns.trainer_started()
        if self._critic is not None:
            self._critic_first_rollout = first_rollout(self._start, None if self._critic.is_new else self._state)
        if HISTORY in self._state:
            self._history.load_state_dict(self._state[HISTORY])

    def _driver_state(self, rollout_id: int) -> dict[str, Any]:
        of_critic = {} if self._critic is None else {FIRST_ROLLOUT: self._critic_first_rollout}
        of_rollouts = {} if self._manager is None else {"rollouts": self._manager.state_dict()}
        return super()._driver_state(rollout_id) | {HISTORY: self._history.state_dict()} | of_critic | of_rollouts

    def _save_source(self, rollout_id: int) -> Any:
        before = self._manager.source_before if self._manager is not None else None
        return super()._save_source(rollout_id) if before is None else before

    def _next_version(self, rollout_id: int) -> WeightVersion:
        """Weights that the engines have not got yet will be another version."""
        return super()._next_version(rollout_id) + (rollout_id + 1 > self._history.trainings)

    def _critic_checkpoints(self) -> CriticCheckpoints | None:
        return None if self._critic is None else self._critic.checkpoints

    async def _start_engines(self) -> None:
        for index, engine in enumerate(await self._engines.start()):
            self._fleet.started(index, engine)
        await self.turns.engines_started(self._fleet)

    async def watch(self) -> NoReturn:
        await self._supervisor.run()

    async def failures(self) -> list[str]:
        return await self._engines.failures()

    async def stop(self) -> None:
        if self._manager is not None:
            await self._manager.close()
        await self._ledger.close()
        await self._pool.close()
        if self._hub is not None:
            await self._hub.close()
        if self._client is not None:
            await self._client.close()
        if self._teacher is not None:
            await self._teacher.close()
        await self._fleet.close()
        await self._engines.stop()
        await self.turns.close()
        if self._critic is not None:
            await self._critic.stop()
        await super().stop()


def health_checks(config: Config) -> HealthChecks:
    """How engines are asked for a token (``--rollout-health-check-*``)."""
    engine = config.engine
    return HealthChecks(
        check=check_generates,
        first_wait_s=engine.rollout_health_check_first_wait,
        interval_s=engine.rollout_health_check_interval,
        timeout_s=engine.rollout_health_check_timeout,
    )
