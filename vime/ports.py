"""What the orchestration (loops, rollout, supervision) knows of the world: a few verbs each.

The real parts stand in ``cluster/``, ``serving/``, ``rewards/`` and ``training/``; a simulator can put others in their
place and run the real orchestration on a virtual clock, because nothing here or behind the loops reads the time except
through the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from vime.types import Generation, Grade, RolloutBatch, Sample, SamplingParams, TokenScores, TrainResult, WeightVersion


class Generator(Protocol):
    """The engines behind the router, as the sampling loop sees them."""

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session_id: str) -> Generation:
        """Samples one continuation. Raises ``vime.errors.EngineError`` when no engine can answer."""

    async def abort(self) -> None:
        """Ends every request in flight; each returns what it has with finish_reason "abort"."""


class Teacher(Protocol):
    """A model that says how likely it would have been to say what another one did."""

    async def log_probs(self, token_ids: Sequence[int], response_length: int) -> list[float]:
        """Of the last ``response_length`` tokens, in nats. Raises ``vime.errors.EngineError``."""

    async def close(self) -> None: ...


class GraderPool(Protocol):
    """Grades answers in processes that can be killed."""

    async def grade(self, rm_type: str, response: str, label: str | None, metadata: Mapping[str, Any]) -> Grade:
        """Never raises for what a grader does: failures and deadlines are Grades with status ERROR."""

    async def close(self) -> None: ...


class DataSource(Protocol):
    """Where prompts come from. A user's ``--data-source-path`` class has these methods too."""

    def get_samples(self, n: int) -> list[list[Sample]]:
        """The next n groups, each of n-samples-per-prompt fresh or partly generated samples."""

    def add_samples(self, groups: list[list[Sample]]) -> None:
        """Takes back groups which were not finished."""

    def __len__(self) -> int: ...


class Rollouts(Protocol):
    """Generation and evaluation, as the training loops see them."""

    def begin(self, rollout_id: int) -> None:
        """Starts what ``generate`` will be asked for next, and returns at once. What it raises, ``generate`` raises."""

    async def generate(self, rollout_id: int) -> RolloutBatch:
        """The samples of a rollout, begun before or not."""

    def synced(self, version: WeightVersion, trainings: int) -> None:
        """The engines serve ``version`` from now on, weights that have so many trainings behind them."""

    async def evaluate(self, rollout_id: int) -> dict[str, float]: ...


class Trainer(Protocol):
    """All ranks of one model, or of actor and critic together, as the training loop sees them."""

    async def train(self, batch: RolloutBatch) -> TrainResult: ...


class ScoringTrainer(Trainer, Protocol):
    """A trainer that is also asked what its model says of a rollout before it learns from it."""

    async def score(self, batch: RolloutBatch) -> dict[int, TokenScores]:
        """By the index of the sample."""


class WeightSync(Protocol):
    """Carries the trainer's weights into every engine."""

    async def sync(self) -> WeightVersion:
        """Returns the version that every engine now serves. Raises ``SyncError`` naming engine and tensor."""


class Checkpoints(Protocol):
    """One atomic unit: model, optimizer, random state, data cursor, buffer, position of the metrics."""

    async def save(self, rollout_id: int) -> Path: ...


class Recorder(Protocol):
    """Takes metrics and samples to metrics.jsonl, TensorBoard and whatever else was asked for."""

    def log(self, metrics: Mapping[str, float], *, rollout_id: int, step: int) -> None: ...

    def samples(self, rollout_id: int, samples: Sequence[Sample], *, name: str = "rollout") -> None: ...
