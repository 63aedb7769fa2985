"""Stand-ins for engines, graders and prompts, for tests of the orchestration alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np

from vime.types import Generation, Grade, GradeStatus, Group, Sample, SamplingParams


class FakeSource:
    """Endless groups of n samples."""

    def __init__(self, n: int = 2) -> None:
        self.n = n
        self.drawn = 0
        self.returned: list[Group] = []

    def get_samples(self, n: int) -> list[Group]:
        groups = []
        for _ in range(n):
            first = self.drawn * self.n
            groups.append(
                [Sample(group_index=self.drawn, index=first + i, prompt="p", label="1") for i in range(self.n)]
            )
            self.drawn += 1
        return groups

    def add_samples(self, groups: list[Group]) -> None:
        self.returned += groups

    def __len__(self) -> int:
        return 10**9


class FakeGenerator:
    """Answers after a random time with tokens that depend on the seed alone."""

    def __init__(self, version: int = 1, finish_reason: str = "stop") -> None:
        self.version = version
        self.finish_reason = finish_reason
        self.in_flight = 0
        self.most_in_flight = 0
        self.requests: list[tuple[list[int], SamplingParams, str]] = []

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session_id: str) -> Generation:
        self.requests.append((list(token_ids), params, session_id))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(random.random() / 100)
        self.in_flight -= 1
        rng = random.Random(params.seed)
        tokens = [rng.randrange(100) for _ in range(rng.randint(1, params.max_tokens))]
        return Generation(
            token_ids=tokens,
            log_probs=[-0.5] * len(tokens),
            weight_versions=[self.version] * len(tokens),
            finish_reason=self.finish_reason,
            routed_experts=routes_wanted(params, [*token_ids, *tokens], self.version),
        )

    async def abort(self) -> None: ...


def routes_of(tokens: Sequence[int], version: int = 1) -> np.ndarray:
    """Where a model of 2 layers with 8 experts might send these tokens."""
    first = np.array([3 * token + 5 * place + version for place, token in enumerate(tokens)])
    return ((first[:, None, None] + np.arange(2)[:, None] + np.array([0, 4])) % 8).astype(np.uint8)


def routes_wanted(params: SamplingParams, tokens: Sequence[int], version: int = 1) -> np.ndarray | None:
    """What an engine tells of a text that it has sampled the end of."""
    start = params.routed_experts_prompt_start
    return None if start is None else routes_of(tokens, version)[start:-1]


class FakeRewarder:
    """Scores by a function of the sample; None stands for a grader that failed."""

    def __init__(self, score=lambda sample: float(sample.index % 2), by_group: bool = False) -> None:  # type: ignore[no-untyped-def]
        self.score = score
        self.by_group = by_group
        self.groups: list[list[Sample]] = []

    async def reward(self, sample: Sample, *, evaluation: bool = False) -> None:
        score = self.score(sample)
        if score is None:
            sample.grade = Grade.error("deadline of 5 s exceeded")
        else:
            sample.reward = score
            sample.grade = Grade(score=score, status=GradeStatus.SCORED)

    async def reward_group(self, samples: list[Sample], *, evaluation: bool = False) -> None:
        self.groups.append(samples)
        for sample in samples:
            await self.reward(sample)


class FakeRecorder:
    """Remembers what it was given."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.recorded: dict[str, list[Sample]] = {}

    def log(self, metrics, *, rollout_id: int, step: int) -> None:  # type: ignore[no-untyped-def]
        self.rows.append({**metrics, "rollout_id": rollout_id, "step": step})

    def samples(self, rollout_id: int, samples: Sequence[Sample], *, name: str = "rollout") -> None:
        self.recorded[f"{name}-{rollout_id}"] = list(samples)
