"""Generation, grading and evaluation of whole rollouts: what the training loop calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from vime.naming import evaluation_name
from vime.ports import Recorder
from vime.rollout.conversion import Convert, PostProcess, to_rollout_batch
from vime.rollout.evaluation import EvalSet, Evaluate, Evaluated, eval_metrics
from vime.rollout.runner import Runner
from vime.rollout.sampling import Collected, Sampler, group_order
from vime.rollout.staleness import StalenessBound
from vime.rollout.tasks import CANCEL_S, cancel_all, together
from vime.types import Group, RolloutBatch, WeightVersion

logger = logging.getLogger(__name__)

Collect = Callable[[int], Awaitable[Collected]]
"""rollout_id → closed groups; what ``--rollout-function-path`` replaces."""

RolloutMetrics = Callable[[int, Collected, float], dict[str, float]]
"""(rollout_id, what was collected, seconds) → metrics."""

EvalMetrics = Callable[[int, Evaluated], dict[str, float]]
"""(rollout_id, what the evaluation gave) → metrics."""


class RolloutManager:
    """Implements ``ports.Rollouts``.

    Args:
        sampler: what rollouts are collected by.
        runner: what evaluation sets are run by that have none of their own.
        collect: replaces the sampler if given.
        evaluate: replaces the evaluation of ``eval_sets`` if given.
        sample_filter: called with the closed groups; marks samples by ``remove_sample``.
        check: called with each batch last, in a thread of its own, because it looks at megabytes of each sample.
        process_all: called afterwards with all groups that were finished, dropped ones too, in the order of their
            prompts.
        save: called with the groups of a rollout as they go into its batch.
        bound: how stale samples may be; its history of the engines' weights is told of each sync.
        look: called with what was collected, which it may tell people of.
        source_state: with ``collect``, whose groups nobody else knows: what a rollout that is begun early starts from,
            and is started from again after a crash.
    """

    def __init__(
        self,
        *,
        sampler: Sampler,
        runner: Runner,
        batch_size: int,
        post_process: PostProcess,
        convert: Convert = to_rollout_batch,
        check: Callable[[RolloutBatch], RolloutBatch] | None = None,
        metrics: RolloutMetrics,
        recorder: Recorder,
        eval_sets: Sequence[EvalSet] = (),
        eval_metrics: EvalMetrics = lambda rollout_id, found: eval_metrics(found.data) | dict(found.metrics),
        collect: Collect | None = None,
        evaluate: Evaluate | None = None,
        sample_filter: Callable[[list[Group]], None] | None = None,
        process_all: Callable[[int, list[Group]], None] | None = None,
        save: Callable[[int, list[Group]], None] | None = None,
        bound: StalenessBound | None = None,
        look: Callable[[int, Sequence[Group]], None] = lambda rollout_id, groups: None,
        source_state: Callable[[], Any] = lambda: None,
    ) -> None:
        self._sampler = sampler
        self._runner = runner
        self._batch_size = batch_size
        self._post_process = post_process
        self._convert = convert
        self._check = check
        self._metrics = metrics
        self._recorder = recorder
        self._eval_sets = eval_sets
        self._eval_metrics = eval_metrics
        self._is_custom = collect is not None
        self._collect = collect or self._sample
        self._evaluate = evaluate or self._evaluate_sets
        self._sample_filter = sample_filter
        self._process_all = process_all
        self._save = save
        self._bound = bound or StalenessBound()
        self._look = look
        self._source_state = source_state
        self.source_before: Any = None  # the state of the source before a custom rollout that has begun
        self._ahead: asyncio.Task[tuple[Collected, float]] | None = None

    def begin(self, rollout_id: int) -> None:
        """Samples in the background, as soon as the engines' weights are new enough for this rollout."""
        assert self._ahead is None, "one rollout is ahead at a time"
        self.source_before = self._source_state() if self._is_custom else None
        self._ahead = asyncio.create_task(self._when_admitted(rollout_id), name=f"rollout {rollout_id}")

    async def _when_admitted(self, rollout_id: int) -> tuple[Collected, float]:
        await self._bound.admits(rollout_id)
        return await self._timed(rollout_id)

    async def _timed(self, rollout_id: int) -> tuple[Collected, float]:
        """What was collected, and the seconds that it took."""
        clock = asyncio.get_running_loop().time
        begin = clock()
        collected = await self._collect(rollout_id)
        return collected, clock() - begin

    def synced(self, version: WeightVersion, trainings: int) -> None:
        self._bound.history.synced(version, trainings)
        self._sampler.admission_changed()

    def advanced(self, version: WeightVersion, trainings: int) -> None:
        """The engines have this version, which has so many more trainings behind it than the one before."""
        self._bound.history.advanced(version, trainings)
        self._sampler.admission_changed()

    async def close(self) -> None:
        """Ends what was begun and not asked for, and what is in flight."""
        if self._ahead is not None:
            await cancel_all([self._ahead], 2 * CANCEL_S)  # it gives groups that long by itself
        await self._sampler.close()

    async def generate(self, rollout_id: int) -> RolloutBatch:
        """One rollout: sampled, graded, recorded, and turned into a batch."""
        ahead, self._ahead = self._ahead, None
        collected, seconds = await (ahead or self._timed(rollout_id))
        self.source_before = None
        groups = collected.groups
        masked = self._bound.mask(groups, rollout_id)
        metrics = self._metrics(rollout_id, collected, seconds) | masked
        self._look(rollout_id, groups)
        if self._sample_filter is not None:
            self._sample_filter(groups)
        if self._process_all is not None:
            finished = groups + [dropped.group for dropped in collected.dropped]
            self._process_all(rollout_id, sorted(finished, key=group_order))
        self._recorder.samples(rollout_id, [sample for group in groups for sample in group])
        if self._save is not None:
            self._save(rollout_id, groups)
        batch = self._convert(rollout_id, groups, self._post_process)
        if self._check is not None:
            batch = await asyncio.to_thread(self._check, batch)
        return replace(batch, metrics=metrics | batch.metrics)

    async def _sample(self, rollout_id: int) -> Collected:
        collected = await self._sampler.collect(rollout_id, self._batch_size)
        return replace(collected, metrics={**collected.metrics, **self._runner.pop_metrics()})

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep of generation, as JSON values."""
        untrained: list[Group] = []
        ahead = self._ahead
        is_there = ahead is not None and ahead.done() and not ahead.cancelled() and ahead.exception() is None
        if ahead is not None and is_there and not self._is_custom:  # an error is raised when its rollout is asked for
            untrained = ahead.result()[0].groups
        return self._sampler.state_dict(untrained=untrained)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where ``state`` was taken."""
        self._sampler.load_state_dict(state)

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        """All evaluation sets under the weights of now; metrics ``eval/NAME`` and the like."""
        async with self._runner.undisturbed():
            found = await self._evaluate(rollout_id)
        for name, entry in found.data.items():
            self._recorder.samples(rollout_id, entry.get("samples") or [], name=f"eval_{name}")
        return self._eval_metrics(rollout_id, found)

    async def _evaluate_sets(self, rollout_id: int) -> Evaluated:
        """One version answers all: it begins anew where no engine was left that had it, and they came back with a newer
        one."""
        history = self._bound.history
        while True:
            version = history.version
            found = {each.name: await self._answers(each, rollout_id) for each in self._eval_sets}
            if history.version == version:
                return Evaluated(data=found)
            logger.warning(
                "the %s begins anew: the engines have version %s of the weights, and had %s",
                *(evaluation_name(rollout_id), history.version, version),
            )

    async def _answers(self, eval_set: EvalSet, rollout_id: int) -> dict[str, Any]:
        runner = eval_set.runner or self._runner
        runs = (runner.run(group, rollout_id, eval_set.sampling, eval_set.name) for group in eval_set.groups())
        return eval_set.result(await together(runs))
