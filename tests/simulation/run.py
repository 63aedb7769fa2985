"""One run of a scenario: the lives of its driver, each from the last complete checkpoint, and how it ended."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.simulation.clock import Stopped, VirtualLoop
from tests.simulation.engines import FakeEngine
from tests.simulation.graders import FakeGraders
from tests.simulation.scenario import Scenario
from tests.simulation.servers import ROUTER, FakeCluster, MakeEngine
from tests.simulation.texts import Tokenizer
from tests.simulation.trainer import Checkpoint, FakeCheckpoints, FakeCritic, FakeLedger, FakeTrainer
from tests.simulation.world import Devices, Evaluation, Event, History, World, mixed
from vime import async_loop, loop
from vime.actor_critic import ActorCritic
from vime.cluster.supervision import HealthChecks, Supervisor, supervised
from vime.cluster.turns import Turns
from vime.cluster.weights import GroupWeightSync
from vime.config import Config, parse_config
from vime.data.chat import PromptEncoder
from vime.data.jsonl import Keys
from vime.data.prompt_set import PromptSet
from vime.data.source import PromptSource, pop_first
from vime.loop import Schedule
from vime.plugins import resolve_hooks
from vime.plugins import rollout as contracts
from vime.ports import Generator
from vime.rollout.build import Prompts, make_hub, make_manager
from vime.rollout.eval_sets import load_eval_inputs
from vime.rollout.hooks import buffer_filter
from vime.rollout.staleness import WeightHistory
from vime.serving.client import RouterClient
from vime.serving.fleet import Fleet
from vime.serving.health import check_generates
from vime.types import Group, RolloutBatch, Sample, TrainResult, derive_seed

ENDS_AFTER_S = 10_000.0
MOST_STEPS = 400_000
MAX_CONTEXT = 64
EVAL_SET = "last"


@dataclass
class Outcome:
    """What became of a run."""

    scenario: Scenario
    history: History
    trace: list[Event]
    weights: int  # of actor and critic, in the end
    state: dict[str, Any]  # what a checkpoint of the end would say of source and rollouts
    problems: list[str] = field(default_factory=list)  # how it went wrong as a whole: stopped, an error, left-overs


def simulate(scenario: Scenario, driver_type: type[Driver] | None = None) -> Outcome:
    """Runs the scenario to its end, whatever its faults.

    Args:
        driver_type: with a bug that a test has planted.
    """
    world = World(scenario.seed)
    checkpoint: Checkpoint | None = None
    for life in range(scenario.faults.driver_crashes + 1):
        world.life = life
        crashes = life < scenario.faults.driver_crashes
        driver = (driver_type or Driver)(scenario, world, checkpoint)
        problems = driver.live(crashes_after=world.chance.seconds(1, 60, "crash", life) if crashes else None)
        if problems or driver.finished:
            break
        checkpoint = driver.checkpoints.last or checkpoint
        world.history = checkpoint.history.copy() if checkpoint is not None else History()
    return Outcome(
        scenario=scenario,
        history=world.history,
        trace=world.trace,
        weights=mixed(driver.trainer.weights, driver.critic.weights),
        state=driver.state,
        problems=problems,
    )


class Driver:
    """The process that runs the loop, with the processes around it: what ``cluster.job`` and ``cluster.launch`` do."""

    told_as = ""  # what a planted bug must be found by

    def __init__(self, scenario: Scenario, world: World, checkpoint: Checkpoint | None) -> None:
        self.scenario, self.world, self.config = scenario, world, config_of(scenario)
        self._saved = checkpoint.driver_state() if checkpoint is not None else {}
        self._start = checkpoint.rollout_id + 1 if checkpoint is not None else 0
        self.trainer = FakeTrainer(
            world,
            weights=checkpoint.weights if checkpoint is not None else derive_seed("weights", scenario.seed),
            trainings=checkpoint.trainings if checkpoint is not None else 0,
        )
        shared = "shared devices" in scenario.features
        capacity_gib = world.chance.pick((16, 24, 32), "memory") if shared else None
        world.devices = Devices(scenario.engines, capacity_gib)
        self.turns = Turns(self.trainer, trainer_leaves=shared, engines_sleep=shared)  # type: ignore[arg-type]
        critic_weights = checkpoint.critic_weights if checkpoint is not None else derive_seed("critic", scenario.seed)
        self.critic = FakeCritic(world, critic_weights)
        self.checkpoints = FakeCheckpoints(world, self.trainer, self.critic, self.turns, self._driver_state)
        self.cluster = FakeCluster(world, scenario.engines, scenario.faults, self.make_engine)
        self.source = self.make_source()
        self.versions = WeightHistory()
        self.state: dict[str, Any] = {}  # in the end
        self.finished = False

    # what a planted bug replaces

    def make_source(self) -> WatchedSource:
        return WatchedSource(self.world, self.config)

    @property
    def make_engine(self) -> MakeEngine:
        return FakeEngine

    def generator(self, client: Generator) -> Generator:
        return client

    def live(self, crashes_after: float | None) -> list[str]:
        """Until the run is over, or the driver crashes; returns what is wrong."""
        order = derive_seed("order", self.scenario.seed, self.world.life)
        clock = VirtualLoop(order, ends_after=ENDS_AFTER_S, most_steps=MOST_STEPS)
        asyncio.set_event_loop(clock)
        try:
            with self.cluster.network():
                return self._live(clock, crashes_after)
        finally:
            asyncio.set_event_loop(None)
            clock.close()

    def _live(self, clock: VirtualLoop, crashes_after: float | None) -> list[str]:
        main = clock.create_task(self._run())
        if crashes_after is not None:
            clock.call_later(crashes_after, self._crash, main)
        try:
            clock.run_until_complete(main)
            self.finished = True
        except asyncio.CancelledError:
            if crashes_after is None:
                return ["the run was cancelled by itself"]
        except Stopped as error:
            waiting = _waiting(clock)
            clock.sweep()
            return [f"{error}; waiting: {', '.join(waiting)}"]
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
        left = [*_waiting(clock), *(request.name for engine in self.cluster.engines for request in engine.requests)]
        return [f"left running: {', '.join(left)}"] if left else []

    def _crash(self, main: asyncio.Task[None]) -> None:
        """What counts is what was saved; the processes go down in order only to show that they can."""
        last = self.checkpoints.last
        self.world.tell("driver crashed", saved=last.rollout_id if last is not None else None)
        main.cancel()

    async def _run(self) -> None:
        config = self.config
        fleet = Fleet(self.cluster.router, tolerant=config.sampling.use_fault_tolerance)
        for index, engine in enumerate(await self.cluster.start()):
            fleet.started(index, engine)
        await self.turns.engines_started(fleet)
        for part in ("parameters", "rest"):
            await self.trainer.onload(part)
        client = RouterClient(ROUTER, fleet, request_timeout_s=config.engine.request_timeout_s)
        prompts = self._prompts()
        hub = make_hub(config, prompts, config.args, FakeGraders(self.world, self.scenario.faults))
        recorder, generator = _Recorder(self.world), self.generator(client)
        self.rollouts = make_manager(config, prompts, config.args, generator, hub, recorder, self.versions)
        self.weights = GroupWeightSync(
            config,
            self.trainer,  # type: ignore[arg-type]
            fleet,
            self.turns,
            probe_prompt=prompts.probe_prompt(),
            transport="nccl" if "broadcast" in self.scenario.features else "shm",
            ledger=FakeLedger(),  # type: ignore[arg-type]
            version=int(self._saved.get("weight_version", 1)) - 1,
            unscheduled=self.rollouts.advanced,
        )
        if self._saved:
            self.versions.load_state_dict(self._saved["weight_history"])
            self.source.load_state_dict(self._saved["source"])
            self.rollouts.load_state_dict(self._saved["rollouts"])
        supervisor = Supervisor(
            fleet,
            self.cluster,
            self.cluster.router,
            self.weights.restore,
            health=HealthChecks(check=check_generates, first_wait_s=0, interval_s=30, timeout_s=30),
            room=self.turns.start_of_engine,
            say=lambda line: None,
        )
        try:
            await supervised(self._train(), supervisor.run(), self._failures)
        finally:
            await self.rollouts.close()
            await hub.close()

    async def _train(self) -> None:
        config = self.config
        schedule = Schedule(
            start=self._start,
            stop=self.scenario.rollouts,
            sync_interval=config.asynchrony.update_weights_interval,
            save_interval=config.checkpoint.save_interval,
            saves_at_end=True,
            eval_interval=config.evaluation.eval_interval,
            evaluates_first=config.evaluation.eval_interval is not None and self._start == 0,
        )
        self.world.tell("start", first=self._start)
        train = async_loop.train if config.asynchrony.asynchronous else loop.train
        has_critic = "critic" in self.scenario.features
        learner = ActorCritic(self.turns, self.critic, actor_scores=False) if has_critic else self.turns
        await train(schedule, self.rollouts, learner, self.weights, self.checkpoints, _Report(self.world))
        self.state = self._driver_state()
        self.world.tell("finished", weights=self.trainer.weights)

    async def _failures(self) -> list[str]:
        return []

    def _prompts(self) -> Prompts:
        hooks = resolve_hooks(self.config)
        return Prompts(
            hooks=hooks,
            tokenizer=Tokenizer(),
            encoder=PromptEncoder(Tokenizer()),
            source=self.source,
            eval_sources=load_eval_inputs(self.config, hooks, Tokenizer()),
            max_context=MAX_CONTEXT,
        )

    def _driver_state(self) -> dict[str, Any]:
        newer = self.trainer.trainings > self.versions.trainings
        return {
            "source": self.source.state_dict(),
            "rollouts": self.rollouts.state_dict(),
            "weight_version": self.weights.version + newer,
            "weight_history": self.versions.state_dict(),
        }


def prompts_of(config: Config) -> PromptSet:
    return PromptSet(spec=str(config.data.prompt_data), keys=Keys(label="label"))


def source_options(config: Config) -> dict[str, Any]:
    own_order = resolve_hooks(config).get(contracts.BUFFER_FILTER)
    return {
        "buffer_filter": buffer_filter(own_order, config.args) if own_order else pop_first,
        "encoder": PromptEncoder(Tokenizer()),
        "n_samples": config.rollout.n_samples_per_prompt,
        "seed": config.data.rollout_seed,
        "shuffle": config.data.rollout_shuffle,
    }


def make_source(scenario: Scenario) -> PromptSource:
    """The source of a scenario, outside of any world."""
    config = config_of(scenario)
    return PromptSource(prompts_of(config), **source_options(config))


class WatchedSource(PromptSource):
    """The real source, and the trace of what it gave and took."""

    def __init__(self, world: World, config: Config) -> None:
        super().__init__(prompts_of(config), **source_options(config))
        self._world = world

    def get_samples(self, n: int) -> list[Group]:
        groups = super().get_samples(n)
        self._world.tell("draw", groups=[group[0].group_index for group in groups])
        return groups

    def add_samples(self, groups: list[Group]) -> None:
        self._world.tell("put back", groups=[group[0].group_index for group in groups])
        super().add_samples(groups)


class _Recorder:
    """Implements ``ports.Recorder``."""

    def __init__(self, world: World) -> None:
        self._world = world

    def log(self, metrics: Mapping[str, float], *, rollout_id: int, step: int) -> None: ...

    def samples(self, rollout_id: int, samples: Sequence[Sample], *, name: str = "rollout") -> None:
        history = self._world.history
        if name.startswith("eval_"):
            versions = frozenset(version for sample in samples for version in sample.weight_versions)
            unfinished = sum(not sample.ended_well for sample in samples)
            history.evaluations.append(
                Evaluation(rollout_id=rollout_id, unfinished=unfinished, versions=versions, newest=max(history.syncs))
            )


class _Report:
    """Implements ``loop.Report``."""

    def __init__(self, world: World) -> None:
        self._world = world

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    def evaluated(self, rollout_id: int, metrics: dict[str, float]) -> None:
        self._world.tell("evaluated", rollout=rollout_id, score=metrics[f"eval/{EVAL_SET}"])

    def trained(self, batch: RolloutBatch, result: TrainResult) -> None:
        self._world.history.metrics.append(batch.metrics)


def _waiting(clock: VirtualLoop) -> list[str]:
    return sorted(str(getattr(task.get_coro(), "__qualname__", task)) for task in asyncio.all_tasks(clock))


@functools.cache
def _folder() -> Path:
    """A model's configuration and prompts, for as long as this process lives."""
    folder = Path(tempfile.mkdtemp(prefix="vime-simulation-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").touch()
    rows = [{"input": "?" * (1 + number % 7), "label": f"prompt {number}"} for number in range(64)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@functools.lru_cache
def config_of(scenario: Scenario) -> Config:
    """What the flags of a scenario mean, with all the rules that flags must keep."""
    folder = _folder()
    words = f"""
        --hf-checkpoint {folder} --prompt-data {folder}/prompts.jsonl@[0:{scenario.prompts}] --label-key label
        --rm-type math --save {folder}/save --actor-num-gpus-per-node 1 --rollout-num-gpus {scenario.engines}
        --num-rollout {scenario.rollouts} --rollout-seed {scenario.seed}
        --run-dir {folder}/run --request-timeout-s 90 --weight-sync-timeout-s 60
        --eval-prompt-data {EVAL_SET} {folder}/prompts.jsonl@[58:]
    """.split()
    return parse_config([*words, *scenario.flags])


MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 32, "hidden_act": "silu",
    "hidden_size": 64, "intermediate_size": 192, "max_position_embeddings": 1024, "model_type": "qwen3",
    "num_attention_heads": 6, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "vocab_size": 512,
}  # fmt: skip
