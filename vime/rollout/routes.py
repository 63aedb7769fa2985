"""Routes of a rollout on their way to the trainer (``--use-rollout-routing-replay``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vime.config import Config
from vime.models import load_shape
from vime.models.routes import RouteShape
from vime.rollout.conversion import Convert, PostProcess
from vime.types import Group, InvalidSample, RolloutBatch, TrainSample

__all__ = ["METRIC", "route_shape", "with_checked_routes"]

METRIC = "rollout/routed_tokens"


def route_shape(config: Config) -> RouteShape | None:
    """What the routes of the run's model look like; None where nobody wants them."""
    if not config.algorithm.use_rollout_routing_replay:
        return None
    return RouteShape.of(load_shape(config.checkpoint.hf_checkpoint))


def with_checked_routes(convert: Convert, shape: RouteShape) -> Convert:
    """A conversion whose batches have routes of that shape, and tell of how many tokens.

    Raises:
        InvalidSample: the routes of a sample are something else.
    """

    def converted(rollout_id: int, groups: Sequence[Group], post_process: PostProcess) -> RolloutBatch:
        batch = convert(rollout_id, groups, post_process)
        samples = tuple(_checked(sample, shape) for sample in batch.samples)
        computed = sum(sample.total_length - 1 for sample in samples)
        share = sum(map(_routed, samples)) / max(computed, 1)
        return dataclasses.replace(batch, samples=samples, metrics={**batch.metrics, METRIC: share})

    return converted


def _checked(sample: TrainSample, shape: RouteShape) -> TrainSample:
    if sample.routed_experts is None:
        return sample
    try:
        routes = shape.checked(sample.routed_experts, sample.total_length)
    except ValueError as error:
        raise InvalidSample(
            f"sample {sample.index} (group {sample.group_index}): its rollout_routed_experts {error}"
        ) from None
    return dataclasses.replace(sample, routed_experts=routes)


def _routed(sample: TrainSample) -> int:
    """Tokens, of those that the trainer computes, whose routes are known in every layer."""
    if sample.routed_experts is None:
        return 0
    return int((sample.routed_experts[: sample.total_length - 1] >= 0).all(axis=(1, 2)).sum())
