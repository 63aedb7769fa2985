"""Runs groups: every sample is generated, shown to the sample hooks and graded.

Invariant: a group holds each of its samples as the last finished stage left it. Generate functions work on copies, so
that a sample whose generation is cancelled or fails is what it was before, and nothing of it is lost or half done. So
do hooks: a sample that they have not done with is one that is generated and awaits them, and is never generated again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Protocol

import aiohttp

from vime.errors import EngineError
from vime.plugins.hook import HookError
from vime.ports import Generator
from vime.rollout.tasks import together
from vime.types import Generation, Group, Sample, SamplingParams, Status, derive_seed

GRACE_S = 5.0
"""For generate functions to come to an end after the engines were told to stop."""

COUNTED = ("continued", "requeued", "given_up")

PATIENCE_S = 60.0
"""The longest wait before an answer is tried again; the first is a second, and each is twice the one before."""

LOST = (EngineError, ConnectionError, TimeoutError, aiohttp.ClientError)
"""What is raised where an engine is lost, also to custom functions that talk to it by themselves."""

logger = logging.getLogger(__name__)

Generate = Callable[[Sample, SamplingParams, bool], Awaitable[list[Sample]]]
"""(sample, how to sample, whether for evaluation) → the sample, filled, or the children that became of it. Children are
never generated again: where one has to be, the drawn sample is, from what it was before the call."""

SampleHook = Callable[[Sample, bool], Awaitable[Sample]]
"""(generated sample, whether for evaluation) → the sample, before it is graded."""


class Rewarder(Protocol):
    """Puts rewards on samples; a failure becomes a Grade with status ERROR, never an exception.

    What a sample has already stays: one that was graded in an earlier rollout is not graded again.
    """

    @property
    def by_group(self) -> bool: ...

    async def reward(self, sample: Sample, *, evaluation: bool = False) -> None: ...

    async def reward_group(self, samples: list[Sample], *, evaluation: bool = False) -> None: ...


class Gate:
    """Implements ``ports.Generator``: engines behind a gate. While it is closed, every request ends at once as aborted,
    so that a dialogue whose request was aborted does not go on with the next one."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._closed = False

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session_id: str) -> Generation:
        if self._closed:
            return Generation(token_ids=[], log_probs=[], weight_versions=[], finish_reason="abort")
        return await self._generator.generate(token_ids, params, session_id=session_id)

    async def abort(self) -> None:
        await self._generator.abort()

    async def close(self) -> None:
        """Returns when every request has ended with what it has."""
        self._closed = True
        await self._generator.abort()

    def open(self) -> None:
        self._closed = False


class Runner:
    """Generates and grades groups, with bounded concurrency.

    Args:
        seed: the run's seed; each sample's own is derived from it and the sample's identity, so it depends neither on
            the order of completion nor on the number of engines.
        concurrency: how many samples may be generated at once; grading is not counted.
        hooks: called with each sample between the two, one after the other.
        gate: the engines, where generation can be halted.
        masks_continued: tokens that a sample had when its generation was interrupted are not trained.
        requeues: how many times a sample whose engine is lost is tried again, from what it was, before it is marked as
            failed; None: the error is raised.
    """

    def __init__(
        self,
        generate: Generate,
        rewarder: Rewarder,
        *,
        seed: int,
        concurrency: int,
        hooks: Sequence[SampleHook] = (),
        gate: Gate | None = None,
        masks_continued: bool = False,
        requeues: int | None = None,
    ) -> None:
        self._generate = generate
        self._rewarder = rewarder
        self._seed = seed
        self._slots = asyncio.Semaphore(concurrency)
        self._hooks = tuple(hooks)
        self._gate = gate
        self._masks_continued = masks_continued
        self._requeues = requeues
        self._halted = False
        self._engines = asyncio.Lock()  # evaluations and halts have them one after the other
        self._calls: set[asyncio.Future[None]] = set()  # of generate functions
        self._counts: Counter[str] = Counter()  # of samples, in training

    async def run(self, group: Group, rollout_id: int, sampling: SamplingParams, evaluation: str = "") -> Group:
        """Fills the group in place and returns it; children stand in the place of the sample that they came from. What
        its samples have already, they keep.

        Args:
            evaluation: the name of the evaluation set, empty in training.
        """
        await together(self._run_sample(each, group, rollout_id, sampling, evaluation) for each in list(group))
        if self._rewarder.by_group and not self._is_interrupted(group):
            await self._rewarder.reward_group(group, evaluation=bool(evaluation))
        return group

    def undisturbed(self) -> AbstractAsyncContextManager[None]:
        """A block in which nothing is halted: an evaluation beside a rollout."""
        return self._engines

    @asynccontextmanager
    async def halt(self) -> AsyncIterator[None]:
        """Nothing is generated within the block. What is under way is aborted and has ``GRACE_S`` to end."""
        async with self._engines:
            self._halted = True
            try:
                await self._abort()
                if self._calls:
                    await asyncio.wait(self._calls, timeout=GRACE_S)
                yield
            finally:
                self._halted = False
                if self._gate is not None:
                    self._gate.open()

    async def _abort(self) -> None:
        """An engine that is lost, or an answer that is, ends a run only where nothing of the kind is tolerated."""
        try:
            if self._gate is not None:
                await self._gate.close()
        except EngineError as error:
            if self._requeues is None:
                raise
            logger.warning("what did not end when it was aborted goes on from what it was before: %s", error)

    def pop_metrics(self) -> dict[str, float]:
        """What happened to samples since the last call."""
        counts, self._counts = self._counts, Counter()
        return {f"rollout/samples/{name}": float(counts[name]) for name in COUNTED}

    async def _run_sample(
        self, sample: Sample, group: Group, rollout_id: int, sampling: SamplingParams, evaluation: str
    ) -> None:
        family = [sample]
        if sample.is_unfinished:
            params = replace(sampling, seed=self._seed_of(sample, rollout_id, evaluation))
            family = await self._at_last(
                lambda: self._generated(sample, rollout_id, params, bool(evaluation)),
                *(sample, rollout_id, bool(evaluation)),
            )
            _put(family, sample, group)
        if self._is_interrupted(family):
            return
        if any(each.awaits_hooks for each in family):
            family = await together(self._shown(each, group, rollout_id, bool(evaluation)) for each in family)
        # how a sample is graded does not depend on whether it has siblings
        if not self._rewarder.by_group:
            await together(self._rewarder.reward(each, evaluation=bool(evaluation)) for each in family)

    def _seed_of(self, sample: Sample, rollout_id: int, evaluation: str) -> int:
        # the same evaluation prompt gets the same seed each time, so that curves differ by the weights alone
        identity = (evaluation,) if evaluation else ("rollout", rollout_id)
        return derive_seed(self._seed, *identity, str(sample.group_index), str(sample.index), sample.response_length)

    async def _at_last(
        self, stage: Callable[[], Awaitable[list[Sample]]], sample: Sample, rollout_id: int, evaluation: bool
    ) -> list[Sample]:
        """What the stage makes of the sample, with whichever engine lives long enough."""
        for attempt in itertools.count():
            try:
                return await stage()
            except Exception as error:
                if self._requeues is None or not engine_is_lost(error):
                    raise
                if attempt == self._requeues:
                    self._counts["given_up"] += not evaluation
                    return [self._given_up(sample, rollout_id, error)]
                if attempt == 0 and not isinstance(error, EngineError):  # perhaps it is no engine that a function lost
                    logger.warning("%s is tried again, as when an engine is lost: %r", sample.name, error)
            self._counts["requeued"] += not evaluation
            await asyncio.sleep(min(2**attempt, PATIENCE_S))
        raise AssertionError("unreachable")

    def _given_up(self, sample: Sample, rollout_id: int, error: Exception) -> Sample:
        failed = replace(sample.copy(), rollout_id=rollout_id, status=Status.FAILED, awaits_hooks=False)
        logger.warning("%s is given up after %s requeues: %s", failed.name, self._requeues, error)
        return failed

    async def _generated(
        self, sample: Sample, rollout_id: int, params: SamplingParams, evaluation: bool
    ) -> list[Sample]:
        """What becomes of the sample; while generation is halted, it may still be what it was."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            async with self._slots:
                if self._halted:
                    return [sample]
                self._calls.add(ended)
                family = await self._generate(self._prepared(sample, rollout_id), params, evaluation)
                self._counts["continued"] += bool(sample.response_length)
            if self._is_interrupted(family):
                return family if len(family) == 1 else [sample]
            for each in family:
                each.awaits_hooks = bool(self._hooks)
            return family
        finally:
            self._calls.discard(ended)
            ended.set_result(None)

    async def _shown(self, sample: Sample, group: Group, rollout_id: int, evaluation: bool) -> Sample:
        """What the hooks make of a generated sample; it takes its place in the group."""
        hooked = [sample]
        if sample.awaits_hooks:
            hooked = await self._at_last(lambda: self._hooked(sample, evaluation), sample, rollout_id, evaluation)
            _put(hooked, sample, group)
        return hooked[0]

    async def _hooked(self, sample: Sample, evaluation: bool) -> list[Sample]:
        sample = sample.copy()
        for hook in self._hooks:
            sample = await hook(sample, evaluation)
        sample.awaits_hooks = False
        return [sample]

    def _prepared(self, sample: Sample, rollout_id: int) -> Sample:
        """A copy to work on."""
        copy = sample.copy()
        copy.rollout_id = rollout_id
        if copy.response_length and self._masks_continued:
            copy.loss_mask = [0] * copy.response_length
        return copy

    def _is_interrupted(self, samples: Sequence[Sample]) -> bool:
        """Whether some of them must be continued later. One that a custom function aborts by itself need not be."""
        return self._halted and any(sample.status in (Status.PENDING, Status.ABORTED) for sample in samples)


def _put(family: Sequence[Sample], sample: Sample, group: Group) -> None:
    """In the sample's place."""
    place = next(i for i, each in enumerate(group) if each is sample)
    group[place : place + 1] = family


def engine_is_lost(error: BaseException | None) -> bool:
    """Whether an engine failed, and not what it was asked for: an answer with a status of 4xx blames the request."""
    cause = error.__cause__ if isinstance(error, HookError) else error
    return isinstance(cause, LOST) and getattr(cause, "status", 500) >= 500
