"""The order in which trainer and engines take the devices. Both are fakes that write down what is asked of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vime.cluster.turns import Turns


class Calls(list[str]):
    """A trainer and an engine in one."""

    async def train(self, batch: Any) -> None:
        self.append("train")

    async def score(self, batch: Any) -> dict[int, Any]:
        self.append("score")
        return {}

    async def save(self, directory: Path) -> None:
        self.append("save")

    async def offload(self, part: str) -> None:
        self.append(f"offload {part}")

    async def onload(self, part: str) -> None:
        self.append(f"onload {part}")

    async def sleep(self, level: int, *, timeout_s: float) -> None:
        self.append(f"sleep {level}")

    async def wake_up(self, *tags: str, timeout_s: float) -> None:
        self.append(" ".join(("wake", *tags)))


async def a_rollout(turns: Turns) -> None:
    await turns.train(None)  # type: ignore[arg-type]
    await turns.to_weights()
    await turns.to_generation()


async def taking_turns(**options: bool) -> tuple[Calls, Turns]:
    calls = Calls()
    turns = Turns(calls, **options)  # type: ignore[arg-type]
    await turns.engines_started([calls])  # type: ignore[list-item]
    return calls, turns


async def test_each_has_the_devices_for_itself() -> None:
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True)
    assert calls == ["sleep 2"]
    await turns.to_weights()
    await turns.to_generation()
    calls.clear()
    await a_rollout(turns)
    assert calls == [
        *("sleep 2", "onload parameters", "onload rest", "train"),
        *("offload rest", "offload parameters", "wake weights", "wake kv_cache"),
    ]


async def test_a_checkpoint_between_rollouts_leaves_the_engines_their_weights() -> None:
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True)
    await turns.to_weights()
    await turns.to_generation()
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
    await turns.to_weights()
    await turns.to_generation()
    calls.clear()
    await critic.score(None)  # type: ignore[arg-type]
    await critic.train(None)  # type: ignore[arg-type]
    await a_rollout(turns)
    assert calls == [
        *("sleep 2", "critic: onload parameters", "critic: onload rest", "critic: score", "critic: train"),
        *("critic: offload rest", "critic: offload parameters", "onload parameters", "onload rest", "train"),
        *("offload rest", "offload parameters", "wake weights", "wake kv_cache"),
    ]


async def test_weights_can_be_exported_after_a_rollout_of_the_critic_alone() -> None:
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True)
    critic = turns.guest(Critic(calls))  # type: ignore[arg-type]
    await critic.train(None)  # type: ignore[arg-type]
    calls.clear()
    await turns.to_export()
    assert calls == [
        *("critic: offload rest", "critic: offload parameters", "onload parameters", "onload rest"),
    ]
    calls.clear()
    await turns.to_export()
    assert calls == [], "it is there already"


async def test_a_checkpoint_of_the_critic_leaves_the_engines_their_weights() -> None:
    calls, turns = await taking_turns(trainer_leaves=True, engines_sleep=True)
    critic = turns.guest(Critic(calls))  # type: ignore[arg-type]
    await turns.to_weights()
    await turns.to_generation()
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
    assert calls == ["wake weights", "offload rest", "offload parameters", "wake kv_cache"]
    calls.clear()
    await turns.to_weights()
    assert calls == [], "it has left already"
