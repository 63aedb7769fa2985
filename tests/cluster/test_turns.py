"""The order in which trainer and engines take the devices. Both are fakes that write down what is asked of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from vime.cluster.turns import REMEMBERED, Turns
from vime.serving.fleet import Fleet
from vime.serving.http import EngineError

GIB = 1 << 30


class Calls(list[str]):
    """A trainer and an engine in one. ``free`` GiB are nobody's; waking takes 8 GiB for weights and 60 for the rest."""

    free = 0
    other = 0  # GiB that somebody else takes meanwhile
    fails = False

    async def free_bytes(self) -> list[int]:
        return [self.free * GIB]

    async def prepare_to_leave(self) -> None:
        self.append("prepare")

    async def shed(self) -> list[int]:
        self.append("shed")
        return await self.free_bytes()

    async def begin_offload(self, part: str) -> None:
        self.append(f"begin {part}")

    __hash__ = object.__hash__  # type: ignore[assignment]
    dead = None

    async def train(self, batch: Any) -> None:
        self.append("train")

    async def score(self, batch: Any) -> dict[int, Any]:
        self.append("score")
        return {}

    async def save(self, directory: Path) -> None:
        self.append("save")

    async def offload(self, part: str) -> None:
        if self.fails:
            raise RuntimeError("the host has no memory")
        self.append(f"offload {part}")

    async def drop_copies(self) -> None:
        self.append("drop copies")

    async def onload(self, part: str) -> None:
        self.append(f"onload {part}")

    async def sleep(self, level: int, *, timeout_s: float) -> None:
        self.append(f"sleep {level}")

    async def wake_up(self, *tags: str, timeout_s: float) -> None:
        self.append(" ".join(("wake", *tags)))
        self.free -= sum({"weights": 8, "kv_cache": 60}[tag] for tag in tags) + self.other


async def a_rollout(turns: Turns) -> None:
    await turns.train(None)  # type: ignore[arg-type]
    await sync(turns)


async def sync(turns: Turns, **options: bool) -> None:
    await turns.to_weights(**options)
    await turns.to_generation()
    await asyncio.sleep(0)  # who is on the way out begins to leave


SHED = ("shed",)
BEGIN = (*SHED, "begin rest", "begin parameters")
LEAVE = ("offload rest", "offload parameters")
COME = ("sleep 2", "onload parameters", "onload rest")


async def taking_turns(**options: Any) -> tuple[Calls, Turns]:
    calls = Calls()
    turns = Turns(calls, **options)  # type: ignore[arg-type]
    await turns.engines_started(Fleet.of([calls]))  # type: ignore[list-item]
    return calls, turns


async def test_each_has_the_devices_for_itself() -> None:
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True)
    assert calls == ["sleep 2"]
    await sync(turns)
    for _ in range(2):
        calls.clear()
        await a_rollout(turns)
        assert calls == [*COME, "train", *BEGIN, *LEAVE, "wake weights", "wake kv_cache"]


async def test_the_trainer_leaves_while_engines_come_where_there_is_room_for_both() -> None:
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True)
    await sync(turns)
    assert calls == ["sleep 2", *BEGIN, *LEAVE, "wake weights", "wake kv_cache"], "nobody knows yet what they take"
    calls.clear()
    calls.free = 100
    await a_rollout(turns)
    assert calls == [*COME, "train", *SHED, "wake weights", "wake kv_cache", *LEAVE]


async def test_the_trainer_leaves_before_keys_and_values_where_there_is_room_for_weights_only() -> None:
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True)
    await sync(turns)
    calls.clear()
    calls.free = 71  # 63 after the weights
    await a_rollout(turns)
    assert calls == [*COME, "train", *BEGIN, "wake weights", *LEAVE, "wake kv_cache"]


async def test_a_copy_of_the_weights_goes_once_engines_have_loaded_it() -> None:
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True)
    await sync(turns, copied=True)
    assert calls == ["sleep 2", *BEGIN, *LEAVE, "wake weights", "drop copies", "wake kv_cache"], "there may be no room"
    calls.clear()
    calls.free = 100
    await turns.train(None)  # type: ignore[arg-type]
    await sync(turns, copied=True)
    await asyncio.sleep(0)
    assert calls == [*COME, "train", *SHED, "wake weights", "wake kv_cache", *LEAVE, "drop copies"]
    calls.clear()
    await sync(turns)
    assert "drop copies" not in calls


async def test_a_copy_goes_also_where_the_trainer_stays() -> None:
    calls, turns = await taking_turns(trainer_leaves=False, engines_sleep=True)
    await sync(turns, copied=True)
    assert calls == ["sleep 2", "wake weights", "drop copies", "wake kv_cache"]


async def test_nobody_comes_before_the_last_has_left() -> None:
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True)
    await sync(turns)
    calls.free = 100
    await turns.train(None)  # type: ignore[arg-type]
    await turns.to_weights()
    await turns.to_generation()
    calls.clear()
    async with turns.comparing():
        calls.append("compare")
    await turns.train(None)  # type: ignore[arg-type]
    assert calls == [*LEAVE, "onload parameters", "compare", "offload parameters", *COME, "train"]


async def test_a_checkpoint_between_rollouts_leaves_the_engines_their_weights() -> None:
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True)
    await sync(turns)
    calls.clear()
    await turns.save(Path("folder"))
    assert calls == [
        *("sleep 1", "onload parameters", "onload rest", "save"),
        *("offload rest", "offload parameters", "wake"),
    ]


async def test_a_comparison_needs_only_the_parameters() -> None:
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True)
    calls.clear()
    async with turns.comparing():
        calls.append("compare")
    assert calls == ["onload parameters", "compare", "offload parameters"]


async def test_nobody_moves_where_both_have_room() -> None:
    calls, turns = await taking_turns(trainer_leaves=False, engines_sleep=False)
    await a_rollout(turns)
    await turns.save(Path("folder"))
    assert calls == ["train", "save"]


async def test_a_trainer_that_shares_no_devices_with_engines_keeps_nobody_waiting() -> None:
    """It shares them with a critic, or has room beside engines that stay awake."""
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=False)
    for _ in range(2):
        await turns.train(None)  # type: ignore[arg-type]
        calls.clear()
        await turns.to_weights(copied=True)
        await turns.to_generation()
        assert not {"offload rest", "offload parameters", "drop copies"} & set(calls)
        await turns.settled()
        assert calls[-3:] == [*LEAVE, "drop copies"]


async def test_how_long_engines_took_to_fall_asleep_is_not_forgotten_when_nobody_was_awake() -> None:
    notes: list[str] = []
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True, note=notes.extend)
    await sync(turns)
    calls.clear()
    notes.clear()
    await turns.train(None)  # type: ignore[arg-type]
    await turns.to_export()
    assert notes.count("perf/turn_time/sleep") == calls.count("sleep 2") == 1


class Critic(Calls):
    """Writes into the list of somebody else, under its own name."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def append(self, call: str) -> None:
        self.calls.append(f"critic: {call}")


async def test_a_critic_on_the_same_devices_comes_and_leaves_too() -> None:
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True)
    critic = turns.guest(Critic(calls))  # type: ignore[arg-type]
    await critic.started()
    await sync(turns)
    calls.clear()
    await critic.score(None)  # type: ignore[arg-type]
    await critic.train(None)  # type: ignore[arg-type]
    await a_rollout(turns)
    assert calls == [
        *("sleep 2", "critic: onload parameters", "critic: onload rest", "critic: score", "critic: train"),
        *("critic: offload rest", "critic: offload parameters", "onload parameters", "onload rest", "train"),
        *(*BEGIN, *LEAVE, "wake weights", "wake kv_cache"),
    ]


async def test_a_critic_has_its_host_memory_before_its_first_turn() -> None:
    for leaves, expected in ((True, [f"critic: {call}" for call in ("prepare", *LEAVE)]), (False, [])):
        calls, turns = await taking_turns(trainer_leaves=leaves, engines_sleep=True)
        calls.clear()
        await turns.guest(Critic(calls)).started()  # type: ignore[arg-type]
        assert calls == expected


async def test_weights_can_be_exported_after_a_rollout_of_the_critic_alone() -> None:
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True)
    critic = turns.guest(Critic(calls))  # type: ignore[arg-type]
    await critic.train(None)  # type: ignore[arg-type]
    calls.clear()
    await turns.to_export()
    assert calls == [
        *("critic: offload rest", "critic: offload parameters", "onload parameters", "onload rest", "shed"),
    ]
    calls.clear()
    await turns.to_export()
    assert calls == ["shed"], "it is there already"


async def test_a_checkpoint_of_the_critic_leaves_the_engines_their_weights() -> None:
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True)
    critic = turns.guest(Critic(calls))  # type: ignore[arg-type]
    await sync(turns)
    calls.clear()
    await critic.save(Path("folder"))
    assert calls == [
        *("sleep 1", "critic: onload parameters", "critic: onload rest", "critic: save"),
        *("critic: offload rest", "critic: offload parameters", "wake"),
    ]


async def test_a_trainer_that_broadcasts_its_weights_leaves_after_them() -> None:
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True)
    calls.clear()
    await turns.to_weights(trainer_stays=True)
    assert calls == ["wake weights"]
    await turns.to_generation()
    assert calls == ["wake weights", *LEAVE, "wake kv_cache"]
    calls.clear()
    await turns.to_weights()
    assert calls == [], "it has left already"


async def test_an_engine_starts_while_the_devices_are_the_engines_and_no_model_comes_meanwhile() -> None:
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True)
    started = asyncio.Event()

    async def start() -> None:
        async with turns.start_of_engine():
            calls.append("begins to start")
            await started.wait()
            calls.append("has started")

    calls.clear()
    starting = asyncio.ensure_future(start())
    await asyncio.sleep(0)
    assert calls == [], "the trainer is there"
    await turns.to_weights()
    await turns.to_generation()
    await asyncio.sleep(0)
    training = asyncio.ensure_future(turns.train(None))  # type: ignore[arg-type]
    for _ in range(5):
        await asyncio.sleep(0)
    started.set()
    await asyncio.gather(starting, training)
    assert calls == [
        *(*BEGIN, *LEAVE, "wake weights", "wake kv_cache"),
        *("begins to start", "has started", "sleep 2", "onload parameters", "onload rest", "train"),
    ]


async def test_a_trainer_makes_room_for_an_engine_that_a_sync_waits_for() -> None:
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True)
    calls.clear()
    await turns.to_starts()
    async with turns.start_of_engine():
        calls.append("starts")
    await turns.to_export()
    assert calls == ["offload rest", "offload parameters", "starts", "onload parameters", "onload rest", "shed"]


async def test_an_engine_that_starts_finds_no_copy_of_the_weights() -> None:
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True)
    await turns.to_weights(copied=True)
    calls.clear()
    await turns.to_starts()
    assert calls == ["drop copies"], "the trainer has left already"


async def test_no_engine_starts_beside_a_comparison() -> None:
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True)
    await sync(turns)
    calls.clear()

    async def start() -> None:
        async with turns.start_of_engine():
            calls.append("starts")

    async with turns.comparing():
        starting = asyncio.ensure_future(start())
        for _ in range(5):
            await asyncio.sleep(0)
        calls.append("compare")
    await starting
    assert calls == ["onload parameters", "compare", "offload parameters", "starts"]


async def test_what_somebody_else_once_took_is_forgotten() -> None:
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True)
    calls.free = 300
    await sync(turns)
    calls.other = 200  # with the second turn's weights
    for _ in range(REMEMBERED + 2):
        calls.clear()
        calls.free = 300
        await a_rollout(turns)
        calls.other = 0
    assert calls == [*COME, "train", *SHED, "wake weights", "wake kv_cache", *LEAVE]


async def test_what_goes_wrong_on_the_way_out_is_raised_before_the_next_turn() -> None:
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True)
    await sync(turns)
    calls.free = 100
    await turns.train(None)  # type: ignore[arg-type]
    calls.fails = True
    await sync(turns)
    with pytest.raises(RuntimeError, match="the host has no memory"):
        await turns.train(None)  # type: ignore[arg-type]
    await turns.close()


async def test_an_engine_that_cannot_be_woken_is_lost_where_that_is_tolerated() -> None:
    class Broken(Calls):
        async def wake_up(self, *tags: str, timeout_s: float) -> None:
            raise EngineError("engine 1 cannot be reached for /wake_up")

    calls, broken = Calls(), Broken()
    fleet = Fleet(tolerant=True)
    fleet.started(0, calls)  # type: ignore[arg-type]
    fleet.started(1, broken)  # type: ignore[arg-type]
    turns = Turns(Calls(), trainer_leaves=True, engines_sleep=True)  # type: ignore[arg-type]
    await turns.engines_started(fleet)
    assert fleet.is_quiet, "nobody asks engines for tokens that sleep"
    await turns.to_weights()
    await turns.to_generation()
    assert not fleet.is_quiet
    assert fleet.engines == [calls]
    assert calls == ["sleep 2", "wake weights", "wake kv_cache"]
