"""Routes of a rollout on their way to the trainer (``--use-rollout-routing-replay``)."""

from __future__ import annotations

import dataclasses
import logging

from vime.config import Config
from vime.models import load_shape
from vime.models.routes import RouteShape
from vime.types import InvalidSample, RolloutBatch, TrainSample

__all__ = ["METRIC", "RouteCheck", "route_shape"]

METRIC = "rollout/routed_tokens"
FLAG = "--use-rollout-routing-replay"

logger = logging.getLogger(__name__)


def route_shape(config: Config) -> RouteShape | None:
    """What the routes of the run's model look like; None where nobody wants them."""
    if not config.algorithm.use_rollout_routing_replay:
        return None
    return RouteShape.of(load_shape(config.checkpoint.hf_checkpoint))


class RouteCheck:
    """Sees to it that the batches of a run have routes of the right shape, and tells of how many tokens.

    It looks at every number: call it where nobody waits.

    Args:
        needed: whether nothing else could choose routes before training does. Then a batch must have some.
    """

    def __init__(self, shape: RouteShape, *, needed: bool = True) -> None:
        self._shape = shape
        self._needed = needed
        self._has_warned = False

    def __call__(self, batch: RolloutBatch) -> RolloutBatch:
        """The same batch with compact routes and the metric.

        Raises:
            InvalidSample: the routes of a sample are something else, or no sample that is trained has any.
        """
        samples = tuple(_checked(sample, self._shape) for sample in batch.samples)
        self._tell_of_missing(samples)
        computed = sum(sample.total_length - 1 for sample in samples)
        share = sum(map(_routed, samples)) / max(computed, 1)
        return dataclasses.replace(batch, samples=samples, metrics={**batch.metrics, METRIC: share})

    def _tell_of_missing(self, samples: tuple[TrainSample, ...]) -> None:
        trained = [sample for sample in samples if sample.trained_tokens]
        missing = [sample for sample in trained if sample.routed_experts is None or not len(sample.routed_experts)]
        if not missing:
            return
        message = (
            f"{FLAG}: {len(missing)} of {len(trained)} samples that are trained have no rollout_routed_experts, the "
            f"first is {_name(missing[0])}; a generate function must keep the routes that the engines tell, and a "
            "custom conversion must give those of tokens that are not the sample's"
        )
        if len(missing) == len(trained) and self._needed:
            raise InvalidSample(message)
        if not self._has_warned:
            logger.warning("%s. The trainer's router sends their tokens where it will. This is said once.", message)
        self._has_warned = True


def _checked(sample: TrainSample, shape: RouteShape) -> TrainSample:
    if sample.routed_experts is None:
        return sample
    try:
        routes = shape.checked(sample.routed_experts, sample.total_length)
    except ValueError as error:
        raise InvalidSample(f"{_name(sample)}: its rollout_routed_experts {error} ({FLAG})") from None
    return dataclasses.replace(sample, routed_experts=routes)


def _name(sample: TrainSample) -> str:
    return f"sample {sample.index} (group {sample.group_index})"


def _routed(sample: TrainSample) -> int:
    """Tokens, of those that the trainer computes, whose routes are known in every layer."""
    if sample.routed_experts is None:
        return 0
    return int((sample.routed_experts >= 0).all(axis=(1, 2)).sum())
