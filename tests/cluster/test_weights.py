"""What engines get when some of them fail or were restarted. Trainer and engines are fakes; the sync is real."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vime.cluster.memory import MemoryLedger
from vime.cluster.turns import Turns
from vime.cluster.weight_folders import WeightFolders
from vime.cluster.weights import GroupWeightSync
from vime.plugins import Hook
from vime.plugins.hook import HookError
from vime.serving.fleet import Fleet, State
from vime.serving.http import EngineError, Refused
from vime.weights import transfers
from vime.weights.plan import WeightPlan
from vime.weights.sync import SyncError

PLAN = WeightPlan.of([("a", (2,), "float32")])
CONFIG: Any = SimpleNamespace(
    engine=SimpleNamespace(weight_sync_timeout_s=60.0, update_weight_buffer_size=1 << 20, weight_probe_interval=0),
    rollout=SimpleNamespace(rollout_temperature=1.0),
    parallel=SimpleNamespace(dtype_name="float32"),
)


class Trainer:
    """Its weights are a number, which training raises. It may take its time to leave."""

    plan, path = PLAN, "/proc/1/fd/1"
    handles: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.weights = 1
        self.exported = 0
        self.calls: list[str] = []
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.may_leave = asyncio.Event()
        self.may_leave.set()
        self.is_here = True

    async def shed(self) -> list[int]:
        return [0]

    free_bytes = shed

    async def begin_offload(self, part: str) -> None: ...

    async def offload(self, part: str) -> None:
        await self.may_leave.wait()
        self.is_here = False

    async def onload(self, part: str) -> None:
        self.is_here = True

    async def train(self, batch: Any) -> Any:
        await self.may_end.wait()
        self.weights += 1

    async def export_weights(self, version: int, *, on_device: bool) -> Trainer:
        self.calls.append(f"export {version}")
        self.exported = self.weights
        self.handles = {"the device": "handle"} if on_device else {}
        return self

    async def drop_copies(self) -> None:
        self.calls.append("drop")
        self.exported = 0

    async def save_hf(self, folder: Path) -> None:
        self.calls.append(f"save {folder.name}")
        os.makedirs(folder, exist_ok=True)
        (folder / "weights").write_text(str(self.weights))

    async def weight_plan(self, version: int) -> WeightPlan:
        self.calls.append(f"plan {version}")
        return PLAN

    async def log_probs_of(self, token_ids: list[int], prompt_length: int) -> list[float]:
        return [-1.0] * (len(token_ids) - prompt_length)


class Engine:
    """Loads what the trainer exports, or has, when it is told to."""

    def __init__(self, name: str, trainer: Trainer) -> None:
        self.url, self.dead = name, None
        self._trainer = trainer
        self.serves: tuple[int, int] | None = None  # (version, weights)
        self.calls: list[str] = []
        self.fails_at = ""

    def __str__(self) -> str:
        return self.url

    async def update(self, info: dict[str, Any], *, timeout_s: float) -> None:
        self._fail("update")
        if "folder" in info:
            self._loaded = int((Path(info["folder"]) / "weights").read_text())
        else:
            self._loaded = self._trainer.exported if "digest" in info else self._trainer.weights

    async def finish_update(self, version: int, *, timeout_s: float) -> None:
        self.serves = version, self._loaded

    def _fail(self, name: str) -> None:
        if name == self.fails_at:
            raise EngineError(f"{self.url} cannot be reached for {name}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        async def call(*arguments: object, **__: object) -> None:
            self._fail(name)
            self.calls.append(f"wake {arguments[0]}" if name == "wake_up" else name)

        return call


class OneBroadcast(transfers.SharedMemory):
    """Stands in for a process group: what arrives is what the trainer has now."""

    def __init__(self, trainer: Trainer, *, bucket_bytes: int) -> None:
        self._trainer = trainer

    async def announce(self, engines: Any, version: int, *, timeout_s: float) -> None:
        await self._trainer.weight_plan(version)
        await transfers.every_engine(engines, lambda engine: engine.announce({}, timeout_s=timeout_s))

    async def load(self, engines: Any, *, timeout_s: float) -> Any:
        return await transfers.failures_of(engines, lambda engine: engine.update({}, timeout_s=timeout_s))


class Scene:
    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        engines: int = 2,
        transport: str = "shm",
        folders: WeightFolders | None = None,
        tolerant: bool = True,
        router: Any = None,
        trainer_leaves: bool = False,
        engines_sleep: bool = False,
    ) -> None:
        monkeypatch.setattr("vime.cluster.weights.Broadcast", OneBroadcast)
        monkeypatch.setattr(GroupWeightSync, "_probe_is_due", lambda self: False)
        self.trainer: Any = Trainer()
        self.fleet = Fleet(router, tolerant=tolerant)
        self.turns = Turns(self.trainer, trainer_leaves=trainer_leaves, engines_sleep=engines_sleep)
        self.unscheduled: list[tuple[int, int]] = []
        self.seen: list[Mapping[str, float]] = []
        self.ledger = MemoryLedger(self.held_by_trainer, self.held_by_engines, self.seen.append)
        self.weights = GroupWeightSync(
            CONFIG,
            self.trainer,
            self.fleet,
            self.turns,
            probe_prompt=[1],
            transport=transport,
            folders=folders,
            ledger=self.ledger,
            version=0,
            unscheduled=lambda version, trainings: self.unscheduled.append((version, trainings)),
        )
        self.engines = [self.start(index) for index in range(engines)]

    def start(self, index: int) -> Engine:
        engine: Any = Engine(f"engine {index}", self.trainer)
        self.fleet.started(index, engine)
        return engine

    def restart(self, index: int) -> Engine:
        self.fleet.lose(self.fleet[index], "killed")
        return self.start(index)

    async def train(self) -> None:
        await self.turns.train(None)  # type: ignore[arg-type]

    async def held_by_trainer(self) -> float:
        return float(self.trainer.is_here)

    async def held_by_engines(self) -> Mapping[str, float]:
        return {"device": 1.0 + self.trainer.is_here}

    async def restore(self, engine: Any) -> bool:
        return await self.weights.restore(engine)

    def is_serving(self, engine: Any) -> bool:
        return self.fleet.state_of(engine) is State.SERVING


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    return lambda **options: Scene(monkeypatch, **options)


async def test_the_first_sync_must_reach_every_engine(scene: Callable[..., Scene]) -> None:
    """What fails then would fail each time, such as a model that does not fit the plan."""
    world = scene()
    world.engines[1].fails_at = "announce"
    with pytest.raises(SyncError, match="engine 1 cannot be reached for announce"):
        await world.weights.sync()


@pytest.mark.parametrize("step", ["announce", "pause", "start_update", "update", "resume"])
@pytest.mark.parametrize("transport", ["shm", "ipc", "nccl"])
async def test_the_others_get_the_new_version_when_an_engine_fails_in_a_sync(
    scene: Callable[..., Scene], step: str, transport: str
) -> None:
    world = scene(transport=transport)
    await world.weights.sync()
    await world.train()
    good, bad = world.engines
    bad.fails_at = step
    assert await world.weights.sync() == 2
    assert good.serves == (2, 2)
    assert world.fleet.engines == [good] == world.fleet.serving
    assert bad.dead is not None and f"cannot be reached for {step}" in bad.dead
    assert not world.fleet.is_quiet


class Choosy:
    """A router that does not take some engines."""

    def __init__(self) -> None:
        self.refuses: set[str] = set()
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def add(self, url: str) -> None:
        await self.is_open.wait()
        if url in self.refuses:
            raise Refused(f"the router answered with 400: {url} is not healthy", 400)


async def test_an_engine_that_the_router_does_not_take_after_a_sync_is_lost_and_the_run_goes_on(
    scene: Callable[..., Scene],
) -> None:
    router = Choosy()
    world = scene(transport="nccl", router=router)
    await world.weights.sync()
    await world.train()
    bad = world.restart(1)
    assert not await world.restore(bad), "it waits for the sync"
    router.refuses = {bad.url}
    assert await world.weights.sync() == 2
    assert world.fleet.serving == [world.engines[0]] == world.fleet.engines
    assert bad.dead is not None and "is not healthy" in bad.dead


@pytest.mark.parametrize("tolerant", [True, False])
async def test_at_the_start_the_router_must_take_every_engine(scene: Callable[..., Scene], tolerant: bool) -> None:
    router = Choosy()
    router.refuses = {"engine 1"}
    with pytest.raises(EngineError, match="engine 1 is not healthy"):
        await scene(router=router, tolerant=tolerant).weights.sync()


async def test_a_checkpoint_never_has_a_version_whose_trainings_it_does_not_know(scene: Callable[..., Scene]) -> None:
    """Also while the router has not taken the engines yet."""
    router = Choosy()
    world = scene(engines=1, transport="nccl", router=router)
    await world.weights.sync()
    await world.train()
    router.is_open.clear()
    restore = asyncio.ensure_future(world.restore(world.restart(0)))
    await asyncio.sleep(0.01)
    assert world.weights.version == 2 and not restore.done()
    assert world.unscheduled == [(2, 1)]
    router.is_open.set()
    assert await restore


async def test_without_tolerance_a_failed_sync_is_raised(scene: Callable[..., Scene]) -> None:
    world = scene(tolerant=False)
    await world.weights.sync()
    world.engines[1].fails_at = "update"
    with pytest.raises(SyncError, match="engine 1 cannot be reached for update"):
        await world.weights.sync()


async def test_shared_memory_has_the_current_version_even_while_the_trainer_trains(scene: Callable[..., Scene]) -> None:
    world = scene()
    await world.weights.sync()
    world.trainer.may_end.clear()
    training = asyncio.ensure_future(world.train())
    await asyncio.sleep(0)
    engine = world.restart(0)
    assert await world.restore(engine)
    assert engine.serves == (1, 1) and world.is_serving(engine)
    world.trainer.may_end.set()
    await training
    assert await world.weights.sync() == 2
    assert engine.serves == (2, 2)


async def test_copies_on_devices_are_dropped_in_each_sync(scene: Callable[..., Scene]) -> None:
    world = scene(transport="ipc")
    for version in (1, 2):
        world.trainer.calls.clear()
        assert await world.weights.sync() == version
        await asyncio.sleep(0)
        assert world.trainer.calls == [f"export {version}", "drop"]
        await world.train()
    assert [engine.serves for engine in world.engines] == [(2, 2)] * 2


async def test_engines_that_sleep_do_not_go_on_before_they_have_memory_for_keys_and_values(
    scene: Callable[..., Scene],
) -> None:
    """Requests that came meanwhile would be computed on memory that is not there."""
    world = scene(engines=1, engines_sleep=True, trainer_leaves=True)
    await world.turns.engines_started(world.fleet)
    engine = world.engines[0]
    for version in (1, 2):
        assert await world.weights.sync() == version
        assert engine.calls == [
            *("sleep", "wake weights", "announce", "start_update", "reset_prefix_cache", "wake kv_cache")
        ]
        engine.calls.clear()
        await world.train()


async def test_an_engine_that_was_restarted_beside_engines_that_sleep_is_awake_and_is_resumed(
    scene: Callable[..., Scene],
) -> None:
    world = scene(engines_sleep=True)
    await world.turns.engines_started(world.fleet)
    await world.weights.sync()
    engine = world.restart(1)
    assert await world.restore(engine)
    assert engine.calls == ["announce", "pause", "start_update", "reset_prefix_cache", "resume"]


async def test_what_is_held_while_engines_generate_is_seen_once_the_trainer_has_left(
    scene: Callable[..., Scene],
) -> None:
    world = scene(trainer_leaves=True)
    world.trainer.may_leave.clear()
    await world.weights.sync()
    await asyncio.sleep(0.01)
    assert world.seen == [], "the sync does not wait for the trainer, and nobody has looked yet"
    world.trainer.may_leave.set()
    await world.turns.settled()
    await asyncio.sleep(0.01)
    assert world.seen == [{"memory/device/generate": 1.0, "memory/actor/generate": 0.0}]


async def test_a_trainer_that_has_not_trained_since_broadcasts_the_same_version_again(
    scene: Callable[..., Scene],
) -> None:
    world = scene(transport="nccl")
    await world.weights.sync()
    engine = world.restart(1)
    assert await world.restore(engine)
    assert engine.serves == (1, 1) and world.is_serving(engine)
    assert world.trainer.calls == ["plan 1", "plan 1"], "for the trainer it is no other version either"
    assert world.unscheduled == []


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
async def test_an_engine_waits_for_the_next_sync_when_the_trainer_has_trained_and_others_serve(
    scene: Callable[..., Scene], transport: str
) -> None:
    world = scene(transport=transport)
    await world.weights.sync()
    await world.train()
    engine = world.restart(1)
    assert not await world.restore(engine)
    assert engine.serves is None and not world.is_serving(engine)
    assert await world.weights.sync() == 2
    assert engine.serves == (2, 2) and world.is_serving(engine)


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
async def test_where_no_engine_is_left_all_get_what_the_trainer_has_as_a_new_version(
    scene: Callable[..., Scene], transport: str
) -> None:
    world = scene(transport=transport)
    await world.weights.sync()
    world.trainer.may_end.clear()
    training = asyncio.ensure_future(world.train())
    await asyncio.sleep(0)
    first, second = world.restart(0), world.restart(1)
    restores = [asyncio.ensure_future(world.restore(engine)) for engine in (first, second)]
    await asyncio.sleep(0.01)
    assert not any(each.done() for each in restores), "the trainer is at work"
    world.trainer.may_end.set()
    await training
    assert await asyncio.gather(*restores) == [True, True]
    assert first.serves == second.serves == (2, 2)
    assert world.weights.version == 2
    assert world.unscheduled == [(2, 1)], "one training more than the version before"


async def test_a_sync_that_is_asked_for_goes_before_one_that_nobody_asked_for(scene: Callable[..., Scene]) -> None:
    world = scene(engines=1, transport="nccl")
    await world.weights.sync()
    world.trainer.may_end.clear()
    training = asyncio.ensure_future(world.train())
    await asyncio.sleep(0)
    engine = world.restart(0)
    restore = asyncio.ensure_future(world.restore(engine))
    await asyncio.sleep(0)
    sync = asyncio.ensure_future(world.weights.sync())
    await asyncio.sleep(0)
    world.trainer.may_end.set()
    assert not await restore
    assert await sync == 2
    await training
    assert world.unscheduled == []
    assert await world.restore(engine), "it serves already"


async def test_a_sync_waits_for_an_engine_where_none_is_left(scene: Callable[..., Scene]) -> None:
    world = scene(engines=1)
    await world.weights.sync()
    await world.train()
    world.fleet.lose(world.fleet[0], "killed")
    sync = asyncio.ensure_future(world.weights.sync())
    await asyncio.sleep(0.01)
    assert not sync.done()
    engine = world.start(0)
    assert await sync == 2
    assert engine.serves == (2, 2) and world.is_serving(engine)


async def test_an_engine_that_fails_while_it_gets_the_weights_says_why(scene: Callable[..., Scene]) -> None:
    world = scene()
    await world.weights.sync()
    engine = world.restart(0)
    engine.fails_at = "update"
    with pytest.raises(SyncError, match="engine 0 cannot be reached for update"):
        await world.restore(engine)
    assert world.fleet.serving == [world.engines[1]]


def on_disk(root: Path, written: Any = None, *, keep: bool = False, timeout_s: float = 60.0) -> WeightFolders:
    hook = None if written is None else Hook(written, "--custom-update-weight-post-write-path", "mine:written")
    return WeightFolders(root, keep=keep, written=hook, args="args", timeout_s=timeout_s)


@pytest.mark.parametrize("keep", [False, True])
async def test_a_version_on_the_disk_is_there_until_every_engine_has_the_next(
    scene: Callable[..., Scene], tmp_path: Path, keep: bool
) -> None:
    world = scene(folders=on_disk(tmp_path, keep=keep))
    names = [f"version_{version:07d}" for version in (1, 2)]
    assert await world.weights.sync() == 1
    assert [engine.serves for engine in world.engines] == [(1, 1), (1, 1)]
    await world.train()
    world.engines[1].fails_at = "update"
    assert await world.weights.sync() == 2
    assert world.engines[0].serves == (2, 2)
    assert sorted(os.listdir(tmp_path)) == (names if keep else names[1:])
    assert world.trainer.calls == ["plan 1", f"save {names[0]}", "plan 2", f"save {names[1]}"]


async def test_a_version_that_did_not_reach_the_engines_removes_none(
    scene: Callable[..., Scene], tmp_path: Path
) -> None:
    world = scene(folders=on_disk(tmp_path), tolerant=False)
    await world.weights.sync()
    world.engines[1].fails_at = "update"
    with pytest.raises(SyncError):
        await world.weights.sync()
    assert sorted(os.listdir(tmp_path)) == ["version_0000001", "version_0000002"]


async def test_the_disk_has_the_current_version_even_while_the_trainer_trains(
    scene: Callable[..., Scene], tmp_path: Path
) -> None:
    world = scene(folders=on_disk(tmp_path))
    await world.weights.sync()
    world.trainer.may_end.clear()
    training = asyncio.ensure_future(world.train())
    await asyncio.sleep(0)
    engine = world.restart(0)
    assert await world.restore(engine)
    assert engine.serves == (1, 1) and world.is_serving(engine)
    world.trainer.may_end.set()
    await training


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_custom_function_sees_a_version_before_the_engines_load_it(
    scene: Callable[..., Scene], tmp_path: Path, is_async: bool
) -> None:
    seen: list[Any] = []

    def written(args: Any, version_dir: str, rollout_engines: list[str]) -> None:
        serves = [engine.serves for engine in world.engines]
        seen.append((args, version_dir, (Path(version_dir) / "weights").read_text(), rollout_engines, serves))

    async def written_async(args: Any, version_dir: str, rollout_engines: list[str]) -> None:
        written(args, version_dir, rollout_engines)

    world = scene(folders=on_disk(tmp_path, written_async if is_async else written))
    await world.weights.sync()
    await world.train()
    await world.weights.sync()
    urls = ["engine 0", "engine 1"]
    assert seen == [
        ("args", str(tmp_path / "version_0000001"), "1", urls, [None, None]),
        ("args", str(tmp_path / "version_0000002"), "2", urls, [(1, 1), (1, 1)]),
    ]


def fails(args: Any, version_dir: str, rollout_engines: list[str]) -> None:
    raise OSError("no space left")


def answers(args: Any, version_dir: str, rollout_engines: list[str]) -> str:
    return version_dir


async def hangs(args: Any, version_dir: str, rollout_engines: list[str]) -> None:
    await asyncio.sleep(3600)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (fails, r"raised OSError: no space left \(test_weights.py:\d+\)"),
        (answers, "must change its arguments in place and return nothing"),
        (hangs, "did not return within --weight-sync-timeout-s 0.05"),
    ],
)
async def test_a_custom_function_that_fails_is_named_and_no_engine_is_touched(
    scene: Callable[..., Scene], tmp_path: Path, written: Any, message: str
) -> None:
    world = scene(folders=on_disk(tmp_path, written, timeout_s=0.05))
    with pytest.raises(HookError, match=rf"path mine:written: {message}.*, for version 1 of the weights$"):
        await world.weights.sync()
    assert [engine.serves for engine in world.engines] == [None, None]
