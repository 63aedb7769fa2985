"""Generation, grading and evaluation of whole rollouts: what the training loop calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from vime.ports import DataSource, Recorder
from vime.rollout.conversion import Convert, PostProcess, to_rollout_batch
from vime.rollout.evaluation import EvalSet, Evaluate, Evaluated, eval_metrics
from vime.rollout.sampling import SamplingLoop, group_order
from vime.rollout.staleness import WeightHistory
from vime.rollout.tasks import together
from vime.types import Group, RolloutBatch, Sample, SamplingParams, WeightVersion, derive_seed

Generate = Callable[[Sample, SamplingParams, bool], Awaitable[list[Sample]]]
"""(sample, how to sample, whether for evaluation) → the sample, filled, or the children that became of it. Children are
never generated again: where one has to be, the drawn sample is, from what it was before the call."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The closed groups of a rollout."""

    groups: list[Group]
    dropped: Sequence[Group] = ()  # finished too, but filtered out
    metrics: Mapping[str, float] = field(default_factory=dict)  # beside those that are made from the groups


Collect = Callable[[int], Awaitable[Collected]]
"""rollout_id → closed groups; what ``--rollout-function-path`` replaces."""

RolloutMetrics = Callable[[int, Collected, float], dict[str, float]]
"""(rollout_id, what was collected, seconds) → metrics."""

EvalMetrics = Callable[[int, Evaluated], dict[str, float]]
"""(rollout_id, what the evaluation gave) → metrics."""


SampleHook = Callable[[Sample, bool], Awaitable[Sample]]
"""(generated sample, whether for evaluation) → the sample, before it is graded."""


class Rewarder(Protocol):
    """Puts rewards on samples; a failure becomes a Grade with status ERROR, never an exception."""

    @property
    def by_group(self) -> bool: ...

    async def reward(self, sample: Sample, *, evaluation: bool = False) -> None: ...

    async def reward_group(self, samples: list[Sample], *, evaluation: bool = False) -> None: ...


class Runner:
    """Generates and grades groups, with bounded concurrency.

    Args:
        seed: the run's seed; each sample's own is derived from it and the sample's identity, so it depends neither on
            the order of completion nor on the number of engines.
        concurrency: how many samples may be generated at once; grading is not counted.
        hooks: called with each sample between the two, one after the other.
    """

    def __init__(
        self,
        generate: Generate,
        rewarder: Rewarder,
        *,
        seed: int,
        concurrency: int,
        hooks: Sequence[SampleHook] = (),
    ) -> None:
        self._generate = generate
        self._hooks = tuple(hooks)
        self._rewarder = rewarder
        self._seed = seed
        self._slots = asyncio.Semaphore(concurrency)

    async def run(self, group: Group, rollout_id: int, sampling: SamplingParams, evaluation: str = "") -> Group:
        """Fills every sample of the group; children stand in the place of the sample that they came from.

        Args:
            evaluation: the name of the evaluation set, empty in training.
        """
        families = await together(self._run_sample(s, rollout_id, sampling, evaluation) for s in group)
        done = [sample for family in families for sample in family]
        if self._rewarder.by_group:
            await self._rewarder.reward_group(done, evaluation=bool(evaluation))
        return done

    async def _run_sample(
        self, sample: Sample, rollout_id: int, sampling: SamplingParams, evaluation: str
    ) -> list[Sample]:
        sample.rollout_id = rollout_id
        # the same evaluation prompt gets the same seed each time, so that curves differ by the weights alone
        identity = (evaluation,) if evaluation else ("rollout", rollout_id)
        seed = derive_seed(self._seed, *identity, str(sample.group_index), str(sample.index), sample.response_length)
        async with self._slots:
            done = await self._generate(sample, replace(sampling, seed=seed), bool(evaluation))
        return await together(self._finish(each, bool(evaluation)) for each in done)

    async def _finish(self, sample: Sample, evaluation: bool) -> Sample:
        """What comes after generation. How a sample is graded does not depend on whether it has siblings."""
        for hook in self._hooks:
            sample = await hook(sample, evaluation)
        if not self._rewarder.by_group:
            await self._rewarder.reward(sample, evaluation=evaluation)
        return sample


class RolloutManager:
    """Implements ``ports.Rollouts``.

    Args:
        collect: replaces the sampling loop if given.
        evaluate: replaces the evaluation of ``eval_sets`` if given.
        sample_filter: called with the closed groups; marks samples by ``remove_sample``.
        process_all: called afterwards with all groups that were finished, dropped ones too, in the order of their
            prompts.
        history: of the weights that the engines had; it is told of each sync.
        max_staleness: how many trainings a rollout that is begun early may lag behind the one that uses it.
    """

    def __init__(
        self,
        *,
        source: DataSource,
        runner: Runner,
        batch_size: int,
        sampling: SamplingParams,
        post_process: PostProcess,
        convert: Convert = to_rollout_batch,
        metrics: RolloutMetrics,
        recorder: Recorder,
        eval_sets: Sequence[EvalSet] = (),
        eval_metrics: EvalMetrics = lambda rollout_id, found: eval_metrics(found.data) | dict(found.metrics),
        collect: Collect | None = None,
        evaluate: Evaluate | None = None,
        sample_filter: Callable[[list[Group]], None] | None = None,
        process_all: Callable[[int, list[Group]], None] | None = None,
        history: WeightHistory | None = None,
        max_staleness: int = 0,
    ) -> None:
        self._source = source
        self._runner = runner
        self._batch_size = batch_size
        self._sampling = sampling
        self._post_process = post_process
        self._convert = convert
        self._metrics = metrics
        self._recorder = recorder
        self._eval_sets = eval_sets
        self._eval_metrics = eval_metrics
        self._collect = collect or self._sample
        self._evaluate = evaluate or self._evaluate_sets
        self._sample_filter = sample_filter
        self._process_all = process_all
        self._history = history or WeightHistory()
        self._max_staleness = max_staleness
        self._ahead: asyncio.Task[tuple[Collected, float]] | None = None

    def begin(self, rollout_id: int) -> None:
        """Samples in the background, as soon as the engines' weights are new enough for this rollout."""
        assert self._ahead is None, "one rollout is ahead at a time"
        self._ahead = asyncio.ensure_future(self._when_admitted(rollout_id))

    async def _when_admitted(self, rollout_id: int) -> tuple[Collected, float]:
        await self._history.until(lambda: rollout_id - self._history.trainings <= self._max_staleness)
        return await self._timed(rollout_id)

    async def _timed(self, rollout_id: int) -> tuple[Collected, float]:
        """What was collected, and the seconds that it took."""
        clock = asyncio.get_running_loop().time
        begin = clock()
        collected = await self._collect(rollout_id)
        return collected, clock() - begin

    def synced(self, version: WeightVersion, trainings: int) -> None:
        self._history.synced(version, trainings)

    async def close(self) -> None:
        """Ends what was begun and not asked for."""
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)

    async def generate(self, rollout_id: int) -> RolloutBatch:
        """One rollout: sampled, graded, recorded, and turned into a batch."""
        ahead, self._ahead = self._ahead, None
        collected, seconds = await (ahead or self._timed(rollout_id))
        groups = collected.groups
        metrics = self._metrics(rollout_id, collected, seconds)
        if self._sample_filter is not None:
            self._sample_filter(groups)
        if self._process_all is not None:
            self._process_all(rollout_id, sorted([*groups, *collected.dropped], key=group_order))
        self._recorder.samples(rollout_id, [sample for group in groups for sample in group])
        batch = self._convert(rollout_id, groups, self._post_process)
        return replace(batch, metrics=metrics | batch.metrics)

    async def _sample(self, rollout_id: int) -> Collected:
        loop = SamplingLoop(self._source, lambda group: self._runner.run(group, rollout_id, self._sampling))
        groups = await loop.collect(self._batch_size)
        return Collected(groups=groups, dropped=loop.dropped)

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        """All evaluation sets under the weights of now; metrics ``eval/NAME`` and the like."""
        found = await self._evaluate(rollout_id)
        for name, entry in found.data.items():
            self._recorder.samples(rollout_id, entry.get("samples") or [], name=f"eval_{name}")
        return self._eval_metrics(rollout_id, found)

    async def _evaluate_sets(self, rollout_id: int) -> Evaluated:
        data = {}
        for eval_set in self._eval_sets:
            runs = (self._runner.run(g, rollout_id, eval_set.sampling, eval_set.name) for g in eval_set.groups())
            data[eval_set.name] = eval_set.result([sample for group in await together(runs) for sample in group])
        return Evaluated(data=data)
