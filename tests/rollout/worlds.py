"""A small world around the real sampler, runner and prompt source: a fake engine and grader on a virtual clock.

An answer is a function of its sample alone: token number i of sample s is ``token_of(s, i)``. So whatever
interruptions, failures and restarts did, it can be told whether an answer is whole.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.simulation.clock import VirtualLoop
from vime.data.chat import PromptEncoder
from vime.data.jsonl import Keys
from vime.data.prompt_set import PromptSet
from vime.data.source import PromptSource
from vime.errors import EngineError
from vime.plugins.answers import Kept
from vime.rollout.generate import SingleTurn
from vime.rollout.runner import Gate, Runner
from vime.rollout.sampling import Collected, InFlight, Sampler, not_failed
from vime.types import Generation, Grade, Group, Sample, SamplingParams

PROMPT = [7, 8, 9]
SIZE = 3  # samples of a group
DROPS = (None, None, None, "zero_std_0.0", "zero_std_1.0", "spare")


def token_of(index: int, place: int) -> int:
    return 100 + (index * 31 + place * 7) % 1000


@dataclass(kw_only=True)
class World:
    """What happens to whom, by seed. Times of one world do not change what another finds out about a group."""

    seed: int = 0  # of answers, verdicts and failures
    times: int = 0  # of how long things take
    failing: float = 0.0  # the chance that an attempt at an answer meets a dying engine
    filtered: bool = True
    version: int = 1
    sampled: Counter[tuple[int, int]] = field(default_factory=Counter)  # how often was each token sampled
    attempts: Counter[int] = field(default_factory=Counter)
    graded: Counter[int] = field(default_factory=Counter)
    ends: set[asyncio.Event] = field(default_factory=set)

    def draw(self, *identity: object) -> random.Random:
        return random.Random(repr((self.seed, *identity)))

    def seconds(self, longest: float, *identity: object) -> float:
        return random.Random(repr((self.times, *identity))).random() * longest

    def length(self, index: int) -> int:
        return self.draw("length", index).randint(1, 8)

    def verdict(self, group: Group) -> Kept:
        reason = self.draw("verdict", group[0].group_index).choice(DROPS) if self.filtered else None
        return Kept(keep=reason is None, reason=reason or "", keep_when_insufficient=reason == "spare")

    # the engine

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session_id: str) -> Generation:
        index = int(session_id.split("-")[-1])
        aborted = asyncio.Event()
        self.ends.add(aborted)
        self.attempts[index] += 1
        tokens: list[int] = []
        try:
            for place in range(len(token_ids) - len(PROMPT), self.length(index)):
                try:
                    await asyncio.wait_for(aborted.wait(), 0.25 + self.seconds(1, "token", index, place, self.version))
                except TimeoutError:
                    pass
                else:
                    return self._answer(tokens, "abort")
                if self.draw("dies", index, place, self.attempts[index]).random() < self.failing:
                    raise EngineError("engine 0 is gone")
                self.sampled[index, place] += 1
                tokens.append(token_of(index, place))
            return self._answer(tokens, "stop")
        finally:
            self.ends.discard(aborted)

    def _answer(self, tokens: list[int], reason: str) -> Generation:
        count = len(tokens)
        return Generation(
            token_ids=tokens,
            log_probs=[-float(self.version)] * count,
            weight_versions=[self.version] * count,
            finish_reason=reason,
        )

    async def abort(self) -> None:
        for aborted in self.ends:
            aborted.set()
        await asyncio.sleep(0.25)  # they answer at once

    # the grader

    by_group = False

    async def reward(self, sample: Sample, *, evaluation: bool = False) -> None:
        if sample.reward is not None or not sample.ended_well:
            return
        assert sample.index is not None
        await asyncio.sleep(self.seconds(6, "grade", sample.index))
        self.graded[sample.index] += 1
        sample.reward = float(sample.index % 2)
        sample.grade = Grade(score=sample.reward)

    async def reward_group(self, samples: list[Sample], *, evaluation: bool = False) -> None:
        raise AssertionError("samples are graded one by one")


class Driver:
    """The real parts of one process."""

    def __init__(self, world: World, prompts: Path, *, requeues: int | None = None, **options: Any) -> None:
        self.world = world
        keys = Keys(input="prompt", label="label")
        encoder = PromptEncoder(None)
        file = PromptSet(spec=str(prompts), keys=keys)
        self.source = PromptSource(file, encoder=encoder, n_samples=SIZE, shuffle=True)
        gate = Gate(world)
        single = SingleTurn(gate, lambda prompt: PROMPT, str, max_context=64)

        async def generate(sample: Sample, params: SamplingParams, evaluation: bool) -> list[Sample]:
            return [await single(sample, params)]

        self.runner = Runner(generate, world, seed=0, concurrency=5, gate=gate, requeues=requeues)
        self.sampler = Sampler(self.source, self.run, judge=not_failed(world.verdict), halt=self.runner.halt, **options)

    async def run(self, group: Group, rollout_id: int) -> Group:
        return await self.runner.run(group, rollout_id, SamplingParams(max_tokens=16))

    async def collect(self, rollout_id: int, target: int) -> Collected:
        collected = await self.sampler.collect(rollout_id, target)
        self.world.version += 1
        return collected

    def state(self) -> dict[str, Any]:
        """As a checkpoint has it."""
        text = json.dumps({"source": self.source.state_dict(), "sampler": self.sampler.state_dict()})
        state: dict[str, Any] = json.loads(text)
        return state

    def load(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state["source"])
        self.sampler.load_state_dict(state["sampler"])


def on_virtual_clock(main: Callable[[], Coroutine[Any, Any, Any]], seed: int = 0) -> Any:
    """Runs a coroutine to its end; all that it started must have ended then."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed, ends_after=1e6, most_steps=10**6)) as runner:

        async def watched() -> Any:
            result = await main()
            assert len(asyncio.all_tasks()) == 1, "something still runs"
            return result

        return runner.run(watched())


__all__ = ["PROMPT", "SIZE", "Driver", "InFlight", "World", "on_virtual_clock", "token_of"]
