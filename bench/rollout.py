"""vime's rollout loop over an engine, without grading, and the same requests without vime."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from vime.config import Config
from vime.observe.recorder import RunRecorder
from vime.observe.rollout_metrics import rollout_metrics
from vime.ports import Generator
from vime.rollout.build import Prompts, load_prompts
from vime.rollout.generate import SingleTurn
from vime.rollout.manager import RolloutManager
from vime.rollout.runner import Runner
from vime.rollout.sampling import Sampler
from vime.serving.client import request_body
from vime.types import Generation, Group, Sample, SamplingParams

CONCURRENCY = 512  # the default of --vllm-server-concurrency: all at once
ROLLOUT_ID = 0  # always the same, and so are seeds


class Requests:
    """Passes requests on to a Generator and notes the bodies that go to the engine."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.bodies: list[dict[str, Any]] = []

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session_id: str) -> Generation:
        self.bodies.append(request_body(token_ids, params))
        return await self._generator.generate(token_ids, params, session_id=session_id)

    async def abort(self) -> None:
        await self._generator.abort()


class SameGroups:
    """A DataSource that gives copies of the same groups at every rollout."""

    def __init__(self, groups: list[Group]) -> None:
        self._groups = groups

    def get_samples(self, n: int) -> list[Group]:
        return copy.deepcopy(self._groups[:n])

    def add_samples(self, groups: list[Group]) -> None:
        raise AssertionError("every group is finished")

    def __len__(self) -> int:
        return len(self._groups)


class NoGrading:
    """A Rewarder that costs nothing."""

    by_group = False

    async def reward(self, sample: Sample, *, evaluation: bool = False) -> None:
        sample.reward = 0.0

    async def reward_group(self, samples: list[Sample], *, evaluation: bool = False) -> None:
        raise AssertionError("samples are graded one by one")


def make_manager(config: Config, generator: Generator, response: int, folder: Path) -> RolloutManager:
    """The manager of a real run, but with a fixed number of response tokens and without grading."""
    prompts = load_prompts(config)
    source = SameGroups(prompts.source.get_samples(config.rollout.rollout_batch_size))
    runner = Runner(_generate(prompts, generator), NoGrading(), seed=0, concurrency=CONCURRENCY)
    params = SamplingParams(max_tokens=response, ignore_eos=True)

    async def run(group: Group, rollout_id: int) -> Group:
        return await runner.run(group, rollout_id, params)

    return RolloutManager(
        sampler=Sampler(source, run, batch_size=len(source)),
        runner=runner,
        batch_size=len(source),
        post_process=lambda samples: ([0.0] * len(samples), [0.0] * len(samples)),
        metrics=lambda rollout_id, collected, seconds: rollout_metrics(collected.groups, seconds, score=Sample.score),
        recorder=RunRecorder(folder / "run"),
    )


def _generate(prompts: Prompts, generator: Generator) -> Any:
    single_turn = SingleTurn(generator, prompts.encoder.encode, prompts.tokenizer.decode, prompts.max_context)

    async def generate(sample: Sample, params: SamplingParams, evaluation: bool) -> list[Sample]:
        return [await single_turn(sample, params)]

    return generate


async def post_directly(session: aiohttp.ClientSession, url: str, bodies: Sequence[dict[str, Any]]) -> int:
    """Posts all bodies at once to an engine; returns the number of tokens that were sampled."""

    async def post(body: dict[str, Any]) -> int:
        async with session.post(f"{url}/inference/v1/generate", json=body) as answer:
            answer.raise_for_status()
            return len(json.loads(await answer.read())["choices"][0]["token_ids"])

    return sum(await asyncio.gather(*map(post, bodies)))
