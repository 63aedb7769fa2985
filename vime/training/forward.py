"""Passes over micro-batches through Megatron's schedules (which know about pipeline stages)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from vime.training.logprobs import TokenLogProbs
from vime.training.model import answer_of, run
from vime.training.packing import MicroBatch

__all__ = ["is_last_stage", "log_probs_of", "outputs_of", "run_schedule"]

Item = TypeVar("Item")


def is_last_stage() -> bool:
    """Whether this rank computes log-probs, and with them losses and metrics."""
    last: bool = parallel_state.is_pipeline_last_stage()
    return last


def log_probs_of(chunks: Sequence[Any], batches: Sequence[MicroBatch], temperature: float) -> list[TokenLogProbs]:
    """Log-probs and entropies of every micro-batch without gradients; empty on all but the last pipeline stage."""
    outputs = outputs_of(chunks, batches, lambda chunk, batch: run(chunk, batch, temperature))
    return [answer_of(output) for output in outputs]


@torch.no_grad()
def outputs_of(
    chunks: Sequence[Any], batches: Sequence[MicroBatch], forward: Callable[[Any, MicroBatch], Tensor]
) -> list[Tensor]:
    """``forward(chunk, batch)`` of every micro-batch without gradients; empty on all but the last pipeline stage.

    Interleaved pipelines take as many micro-batches at a time as there are ranks, so the last one may run again.
    """
    stages: int = parallel_state.get_pipeline_model_parallel_world_size()
    again = -len(batches) % stages if len(chunks) > 1 else 0

    def step(batch: MicroBatch, chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        return forward(chunk, batch), lambda output, non_loss_data: output

    repeated = [*batches, *[batches[-1]] * again]
    return run_schedule(chunks, repeated, step, forward_only=True, collect_non_loss_data=True)[: len(batches)]


def run_schedule(
    chunks: Sequence[Any],
    items: Sequence[Item],
    step: Callable[[Item, Any], tuple[Tensor, Callable[..., Any]]],
    **options: bool,
) -> list[Any]:
    """Runs ``step(item, chunk)`` for all items and chunks in the order of the pipeline schedule.

    Returns what the loss functions on the last stage returned beside the loss, one an item; nothing on other stages.
    """

    def forward_step(items: Iterator[Item], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        return step(next(items), chunk)

    iterators = [iter(items) for _ in chunks]
    single = len(chunks) == 1
    collected: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators[0] if single else iterators,
        model=chunks[0] if single else list(chunks),
        num_microbatches=len(items),
        seq_length=1,  # both are unused: packs tell their lengths
        micro_batch_size=1,
        **options,
    )
    return collected
