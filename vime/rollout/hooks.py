"""Users' functions in the places of ours: each is called as its contract says, and its answer is checked."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from vime.errors import UserError
from vime.plugins import accepted_keywords
from vime.ports import DataSource
from vime.rollout.evaluation import EvalData, Evaluate
from vime.rollout.manager import CollectGroups, Generate
from vime.types import Group, InvalidSample, Sample, SamplingParams

Function = Callable[..., Any]


def custom_generate(function: Function, args: Any) -> Generate:
    """``--custom-generate-function-path``: async f(args, sample, sampling_params[, evaluation]) → the sample."""
    takes_evaluation = bool(accepted_keywords(function, ("evaluation",)))

    async def generate(sample: Sample, params: SamplingParams, evaluation: bool) -> Sample:
        keywords = {"evaluation": evaluation} if takes_evaluation else {}
        result = await function(args, sample, request_params(params), **keywords)
        if not isinstance(result, Sample):
            raise UserError(
                f"--custom-generate-function-path must return the Sample, not {type(result).__name__}, "
                f"for {sample.name}"
            )
        return result

    return generate


def request_params(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as users' functions get them: a dict that fits into a request to the engine."""
    values = dataclasses.asdict(params)
    return values | {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)}


def custom_rollout(function: Function, args: Any, source: DataSource) -> CollectGroups:
    """``--rollout-function-path``: f(args, rollout_id, data_source, evaluation=False) → groups, or an object that has
    them as ``samples``. It may be a plain function; then it runs in a thread."""

    async def collect(rollout_id: int) -> list[Group]:
        result = await _call(function, args, rollout_id, source, evaluation=False)
        groups = getattr(result, "samples", result)
        if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
            raise UserError("--rollout-function-path must return a list of groups, each a list of samples")
        for sample in (sample for group in groups for sample in group):
            if not isinstance(sample, Sample):
                raise UserError(f"--rollout-function-path: a group holds a {type(sample).__name__} instead of a Sample")
            sample.rollout_id = rollout_id
        return groups

    return collect


def custom_evaluation(function: Function, args: Any, source: DataSource) -> Evaluate:
    """``--eval-function-path``: the same with evaluation=True → {name: {rewards, truncated, samples}}, or an object
    that has it as ``data``."""

    async def evaluate(rollout_id: int) -> EvalData:
        result = await _call(function, args, rollout_id, source, evaluation=True)
        data = getattr(result, "data", result)
        if not isinstance(data, Mapping) or not all("rewards" in entry for entry in data.values()):
            raise UserError("--eval-function-path must return a dict of data sets, each a dict with the key rewards")
        return data

    return evaluate


async def _call(function: Function, *arguments: Any, **keywords: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **keywords)
    return await asyncio.to_thread(function, *arguments, **keywords)


def custom_post_process(function: Function, args: Any) -> Callable[[list[Sample]], tuple[list[float], list[float]]]:
    """``--custom-reward-post-process-path``: f(args, samples) → (raw rewards, rewards)."""

    def post_process(samples: list[Sample]) -> tuple[list[float], list[float]]:
        result = function(args, samples)
        try:
            raw, rewards = ([float(value) for value in values] for values in result)
        except (TypeError, ValueError) as error:
            raise InvalidSample(
                f"--custom-reward-post-process-path must return two lists of numbers, (raw rewards, rewards): {error}"
            ) from None
        return raw, rewards

    return post_process
