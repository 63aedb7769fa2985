"""The real loops over a real engine, with a trainer that sleeps: what is measured is how they spend their time.

Nothing is learned, so a sync moves no weights; it halts the engine, drops its keys and values and lets it go on, as
every sync does around the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.engine import running_engine
from bench.rollout import NoGrading
from tests.tiny import make_model
from vime import async_loop, loop
from vime.config import Config, parse_config
from vime.loop import Schedule
from vime.observe.recorder import RunRecorder
from vime.ports import Generator
from vime.rollout.build import load_prompts, make_manager
from vime.rollout.staleness import WeightHistory
from vime.serving.client import RouterClient
from vime.serving.control import EngineControl
from vime.types import Generation, RolloutBatch, SamplingParams, TrainResult, WeightVersion

PROMPTS = 256
FLAGS = [
    *("--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--rm-type", "math"),
    *("--rollout-batch-size", "8", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "256"),
    *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--num-rollout", "1000"),
    *("--vllm-max-model-len", "320", "--vllm-max-num-seqs", "64"),
]

LengthOf = Callable[[str], int]
"""session id, which is the sample's → tokens of its response."""


def base_flags(folder: Path) -> list[str]:
    """A tiny model and plain prompts, written there."""
    model = make_model(folder / "model", "llama", tied=True)
    rows = [{"prompt": f"What is {i} + {i}?", "label": str(2 * i)} for i in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--hf-checkpoint", str(model), "--prompt-data", str(folder / "prompts.jsonl"), *FLAGS]


@contextlib.contextmanager
def engine_for(flags: Sequence[str], folder: Path) -> Iterator[str]:
    """The URL of an engine for the model of these flags."""
    with running_engine(parse_config(flags), folder) as url:
        yield url


class Measured:
    """Implements ``ports.Generator``: responses of given lengths, and a gate that a sync can close.

    ``version`` is that of the weights; the engine knows none, as it never gets any.
    """

    def __init__(self, generator: Generator, length_of: LengthOf) -> None:
        self._generator, self._length_of = generator, length_of
        self._open = asyncio.Event()
        self._open.set()
        self._in_flight = 0
        self._changed = asyncio.Event()
        self.version: WeightVersion = 0

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session_id: str) -> Generation:
        await self._open.wait()
        exact = replace(params, max_tokens=self._length_of(session_id), ignore_eos=True)
        version = self.version
        self._in_flight += 1
        try:
            answer = await self._generator.generate(token_ids, exact, session_id=session_id)
            return replace(answer, weight_versions=[version] * len(answer.token_ids))
        finally:
            self._in_flight -= 1
            self._changed.set()

    async def abort(self) -> None:
        await self._generator.abort()

    @contextlib.asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """New requests wait; the block runs when no other is left."""
        self._open.clear()
        while self._in_flight:
            self._changed.clear()
            await self._changed.wait()
        try:
            yield
        finally:
            self._open.set()


@dataclass
class Swap:
    """Implements ``ports.WeightSync``."""

    engine: EngineControl
    generator: Measured
    drains: bool

    async def sync(self) -> WeightVersion:
        async with self.generator.drained() if self.drains else contextlib.nullcontext():
            await self.engine.pause("keep")
            await self.engine.reset_prefix_cache()
            await self.engine.resume()
        self.generator.version += 1
        return self.generator.version


@dataclass
class Sleeper:
    """Implements ``ports.Trainer``. Without ``seconds`` it takes as long as the rollout took to generate."""

    seconds: float | None

    async def train(self, batch: RolloutBatch) -> TrainResult:
        await asyncio.sleep(batch.metrics["perf/rollout_time"] if self.seconds is None else self.seconds)
        return TrainResult(steps=({},))


class NoCheckpoints:
    async def save(self, rollout_id: int) -> Path:
        raise AssertionError("nothing is saved")


@dataclass
class Stopwatch:
    """Implements ``loop.Report``: the seconds of each phase, one value a rollout."""

    phases: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = asyncio.get_running_loop().time()
        yield
        self.phases[name].append(asyncio.get_running_loop().time() - begin)

    def evaluated(self, rollout_id: int, metrics: dict[str, float]) -> None: ...

    def trained(self, batch: RolloutBatch, result: TrainResult) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of one run, in seconds. ``wall`` begins when the first sync has ended: all runs have that one."""

    wall: float
    phases: dict[str, list[float]]

    def __add__(self, other: Times) -> Times:
        """Of both runs, one after the other."""
        phases = {name: self.phases[name] + other.phases[name] for name in self.phases}
        return Times(wall=self.wall + other.wall, phases=phases)

    def total(self, phase: str) -> float:
        return sum(self.phases[phase])

    def waiting(self) -> float:
        """How long training waited for samples and syncs, from the end of the first rollout's training on."""
        return sum(self.phases["generate"][1:]) + sum(self.phases["sync"][1:])


async def run(
    flags: Sequence[str],
    url: str,
    folder: Path,
    *,
    rollouts: int,
    train_s: float | None,
    length_of: LengthOf,
    drains: bool = False,
) -> Times:
    """``train.py`` or ``train_async.py`` with these flags."""
    config: Config = parse_config(flags)
    client, control = RouterClient(url), EngineControl(url)
    generator = Measured(client, length_of)
    prompts = load_prompts(config)
    recorder = RunRecorder(folder / "run")
    manager = make_manager(config, prompts, config.args, generator, NoGrading(), recorder, WeightHistory())
    watch = Stopwatch()
    train = async_loop.train if config.asynchrony.asynchronous else loop.train
    begin = asyncio.get_running_loop().time()
    try:
        await train(
            Schedule(start=0, stop=rollouts),
            manager,
            Sleeper(train_s),
            Swap(control, generator, drains),
            NoCheckpoints(),
            watch,
        )
        wall = asyncio.get_running_loop().time() - begin - watch.phases["sync"][0]
    finally:
        await manager.close()
        await client.close()
        await control.close()
        recorder.close()
    return Times(wall=wall, phases=dict(watch.phases))
