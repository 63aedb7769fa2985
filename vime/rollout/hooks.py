"""Users' functions in the places of ours: each is called as its contract says, and its answer is checked."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any

from vime.plugins import Hook
from vime.plugins.answers import (
    eval_data_and_metrics,
    generated_sample,
    groups_and_metrics,
    hooked_sample,
    new_groups,
    rewards_pair,
)
from vime.plugins.contract import WrongAnswer, read_nothing
from vime.plugins.rollout_trials import request_params
from vime.plugins.train_data import train_rows
from vime.plugins.trial import is_coroutine_function
from vime.ports import DataSource
from vime.rollout.conversion import Convert, PostProcess, index_of
from vime.rollout.evaluation import Evaluate, Evaluated
from vime.rollout.manager import Collect, Collected, Generate, SampleHook
from vime.types import Group, RolloutBatch, Sample, SamplingParams, TrainSample


class CustomSource:
    """``--data-source-path``: an object of the user's class; implements ``ports.DataSource``."""

    def __init__(self, hook: Hook, args: Any) -> None:
        source: Any = hook.call(args, about="the start of the run")
        self._get, self._add, self._save, self._load, self._len = (
            hook.method(source, name) for name in ("get_samples", "add_samples", "save", "load", "__len__")
        )

    def get_samples(self, n: int) -> list[Group]:
        return self._get.call(n, about=f"{n} groups", read=functools.partial(new_groups, wanted=n))

    def add_samples(self, groups: list[Group]) -> None:
        self._add.call(groups, about=f"{len(groups)} groups")

    def save(self, rollout_id: int) -> None:
        """It keeps its own files."""
        self._save.call(rollout_id, about=f"the checkpoint of rollout {rollout_id}")

    def load(self, rollout_id: int) -> None:
        self._load.call(rollout_id, about=f"the checkpoint of rollout {rollout_id}")

    def __len__(self) -> int:
        return int(self._len.call(about="its prompts"))


def custom_generate(hook: Hook, args: Any) -> Generate:
    """``--custom-generate-function-path``: async f(args, sample, sampling_params[, evaluation]) → the sample."""
    takes_evaluation = hook.takes("evaluation")

    async def generate(sample: Sample, params: SamplingParams, evaluation: bool) -> Sample:
        keywords = {"evaluation": evaluation} if takes_evaluation else {}
        read = functools.partial(generated_sample, index=sample.index, group_index=sample.group_index)
        return await hook.acall(args, sample, request_params(params), **keywords, about=sample.name, read=read)

    return generate


def custom_rollout(hook: Hook, args: Any, source: DataSource, *, generated: bool = True) -> Collect:
    """``--rollout-function-path``: f(args, rollout_id, data_source, evaluation=False) → groups, or an object that has
    them as ``samples``. It may be a plain function; then it runs in a thread.

    Args:
        generated: whether its samples must have responses; those of fine-tuning get them later.
    """
    read = functools.partial(groups_and_metrics, generated=generated)

    async def collect(rollout_id: int) -> Collected:
        about = f"rollout {rollout_id}"
        groups, metrics = await _call(hook, args, rollout_id, source, evaluation=False, about=about, read=read)
        for sample in (sample for group in groups for sample in group):
            sample.rollout_id = rollout_id
        return Collected(groups=groups, metrics=metrics)

    return collect


def custom_evaluation(hook: Hook, args: Any, source: DataSource) -> Evaluate:
    """``--eval-function-path``: the same with evaluation=True → {name: {rewards, truncated, samples}}, or an object
    that has it as ``data``."""

    async def evaluate(rollout_id: int) -> Evaluated:
        about = f"the evaluation before rollout {rollout_id}"
        data, metrics = await _call(
            hook, args, rollout_id, source, evaluation=True, about=about, read=eval_data_and_metrics
        )
        return Evaluated(data=data, metrics=metrics)

    return evaluate


async def _call(hook: Hook, *arguments: Any, **keywords: Any) -> Any:
    if is_coroutine_function(hook.function):
        return await hook.acall(*arguments, **keywords)
    return await asyncio.to_thread(functools.partial(hook.call, *arguments, **keywords))


def custom_post_process(hook: Hook, args: Any) -> Callable[[list[Sample]], tuple[list[float], list[float]]]:
    """``--custom-reward-post-process-path``: f(args, samples) → (raw rewards, rewards)."""

    def post_process(samples: list[Sample]) -> tuple[list[float], list[float]]:
        read = functools.partial(rewards_pair, count=len(samples))
        return hook.call(args, samples, about=about_rollout(samples), read=read)

    return post_process


def sample_filter(hook: Hook, args: Any) -> Callable[[list[Group]], None]:
    """``--rollout-sample-filter-path``: f(args, groups), which sets ``remove_sample``."""

    def apply(groups: list[Group]) -> None:
        samples = [sample for group in groups for sample in group]
        hook.call(args, groups, about=about_rollout(samples), read=read_nothing)

    return apply


def all_samples_process(hook: Hook, args: Any, source: DataSource) -> Callable[[int, list[Group]], None]:
    """``--rollout-all-samples-process-path``: f(args, all_samples, data_source), with the groups that were dropped."""

    def apply(rollout_id: int, groups: list[Group]) -> None:
        hook.call(args, groups, source, about=f"rollout {rollout_id}", read=read_nothing)

    return apply


def sample_hook(hook: Hook, args: Any) -> SampleHook:
    """``--rollout-sample-hook``: f(args, sample, rollout_id=, evaluation=) → the sample, or None."""

    async def apply(sample: Sample, evaluation: bool) -> Sample:
        read = functools.partial(hooked_sample, sample=sample)
        keywords = {"rollout_id": sample.rollout_id, "evaluation": evaluation}
        if is_coroutine_function(hook.function):
            return await hook.acall(args, sample, **keywords, about=sample.name, read=read)
        return hook.call(args, sample, **keywords, about=sample.name, read=read)

    return apply


def custom_conversion(hook: Hook, args: Any, needs_log_probs: str | None) -> Convert:
    """``--custom-convert-samples-to-train-data-path``: f(args, samples) → a dict of lists, one entry a row.

    Args:
        needs_log_probs: the flag that cannot do without log-probs of the engine.
    """

    def convert(rollout_id: int, groups: Sequence[Group], post_process: PostProcess) -> RolloutBatch:
        samples = sorted((sample for group in groups for sample in group), key=index_of)

        def read(answer: Any) -> list[TrainSample]:
            found = train_rows(answer, samples)
            if not found or len(found) % args.global_batch_size:
                size = args.global_batch_size
                raise WrongAnswer(f"returned {len(found)} rows, which are no multiple of --global-batch-size {size}")
            if needs_log_probs is not None and any(row.rollout_log_probs is None for row in found):
                raise WrongAnswer(f"returned no rollout_log_probs, and {needs_log_probs} needs them")
            return found

        rows = hook.call(args, samples, about=f"rollout {rollout_id}", read=read)
        return RolloutBatch(rollout_id=rollout_id, samples=tuple(rows))

    return convert


def about_rollout(samples: list[Sample]) -> str:
    """How messages name the rollout of these samples."""
    return f"rollout {samples[0].rollout_id}"
