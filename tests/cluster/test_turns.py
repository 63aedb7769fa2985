"""The order in which trainer and engines take the devices. Both are fakes that write down what is asked of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vime.cluster.turns import Turns


class Calls(list[str]):
    """A trainer and an engine in one."""

    async def train(self, batch: Any) -> None:
        self.append("train")

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
