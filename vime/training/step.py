"""One optimizer step: forward and backward over the micro-batches, exact means over ranks, a guarded update."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from vime.algorithms import reduce
from vime.errors import UserError
from vime.plugins import WrongAnswer
from vime.training.forward import run_schedule
from vime.training.loss import Partial
from vime.training.optimizer import is_draft
from vime.training.packing import MicroBatch
from vime.types import TrainStep

__all__ = ["Learner", "Objective", "gather_parameters"]

logger = logging.getLogger(__name__)

G = TypeVar("G")
Given = TypeVar("Given", contravariant=True)


class Objective(Protocol[Given]):
    """What a model learns: one forward pass, and a micro-batch's part of the loss of the whole step.

    ``Given`` is what is known of the tokens of a micro-batch before its training pass.
    """

    @property
    def per_token(self) -> bool:
        """Whether tokens weigh alike, and not samples."""

    def forward(self, chunk: Any, batch: MicroBatch) -> Tensor:
        """The output of a (wrapped) model chunk."""

    def loss(self, output: Tensor, batch: MicroBatch, given: Given, mean: reduce.Reduction) -> tuple[Tensor, Partial]:
        """From the output of the last chunk to this micro-batch's part of the loss and of the metrics."""


@dataclass(slots=True, kw_only=True)
class Learner(Generic[G]):
    """What one optimizer step needs: the model, its optimizer and the objective."""

    chunks: Sequence[Any]
    optimizer: Any
    scheduler: Any
    objective: Objective[G]
    prefix: str = "train/"  # of the names of its metrics
    prepared: Callable[[], AbstractContextManager[None]] = nullcontext  # inside, passes have what they need; collective
    updating: Callable[[], None] = lambda: None  # called before main weights and moments are touched

    def step(self, work: Sequence[tuple[MicroBatch, G]], step: TrainStep, *, name: str = "a step") -> dict[str, float]:
        """One update from this rank's micro-batches; every rank returns the metrics of the whole step.

        A loss or gradient that is not finite leaves weights, moments and learning rate as they were, and is counted in
        ``skipped_steps``; a warning names the step and the samples of this rank whose loss it was.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with self.prepared():
            parts = run_schedule(self.chunks, work, self._forward(step, len(work)), forward_only=False)
        metrics = total(parts)
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        loss = metrics[f"{self.prefix}loss"]
        self.updating()
        # where a clip decides, a loss that is not finite can have a gradient that is
        updated, norms = apply_gradients(self.optimizer) if math.isfinite(loss) else (False, {"grad_norm": math.nan})
        if updated:
            self.scheduler.step(increment=1)
        else:
            found = ", ".join(f"{what} {norm}" for what, norm in norms.items())
            logger.warning("%s skipped: loss %s, %s%s", name, loss, found, _suspects(work, parts))
        return metrics | {
            **{f"{self.prefix}{each}": norm for each, norm in norms.items()},
            f"{self.prefix}lr": learning_rate,
            f"{self.prefix}skipped_steps": float(not updated),
        }

    def _forward(self, step: TrainStep, micro_batches: int) -> Callable[[tuple[MicroBatch, G], Any], Any]:
        """Megatron divides a loss by the tokens that come with it (1 here), by the number of micro-batches, and its
        gradients by the ranks that average them. Ours is a part of a sum, so it is multiplied by all of that first.
        Context-parallel ranks are among those that average: they have the same loss, and each propagates a part."""
        ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        one = torch.ones((), dtype=torch.int)

        def forward(work: tuple[MicroBatch, G], chunk: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            batch, given = work

            def loss(output: Tensor) -> tuple[Tensor, Tensor, Partial]:
                mean = make_reduction(batch, step, per_token=self.objective.per_token)
                value, partial = self.objective.loss(output, batch, given, mean)
                return value * (micro_batches * ranks), one, partial

            if chunk.config.recompute_granularity == "full" and batch.segments.kept is None:
                batch.segments.kept = {}  # several chunks of one rank share it
            return self.objective.forward(chunk, batch), loss

        return forward


def _suspects(work: Sequence[tuple[MicroBatch, Any]], parts: Sequence[Partial]) -> str:
    """The samples whose loss is not finite, for a message; parts are there on the last pipeline stage."""
    indices = [
        index
        for (batch, _), part in zip(work, parts, strict=False)
        if part.suspects_n is not None
        for index, suspect in zip(batch.indices, part.suspects_n.tolist(), strict=True)
        if suspect
    ]
    return f"; not finite: the loss of sample {', '.join(map(str, indices))}" if indices else ""


def make_reduction(batch: MicroBatch, step: TrainStep, *, per_token: bool) -> reduce.Reduction:
    """The weights of this micro-batch's tokens in the whole step."""
    if per_token:
        return reduce.per_token(batch.mask_t, num_tokens=step.num_tokens)
    trained_n = reduce.segment_sum(batch.mask_t.long(), batch.lengths_n) + batch.sibling_tokens_n
    return reduce.per_sample(batch.mask_t, batch.lengths_n, num_samples=step.num_samples, trained_tokens_n=trained_n)


def gather_parameters(chunks: Sequence[Any]) -> None:
    """Brings the parameters up to date for whoever reads them outside of a forward pass.

    With --overlap-param-gather a step updates each rank's own part, and a forward pass fetches the rest as it goes.
    """
    for chunk in chunks:
        if chunk.use_forward_hook:
            chunk.start_param_sync(force_sync=True)


def apply_gradients(optimizer: Any) -> tuple[bool, dict[str, float]]:
    """Clips by the global norm and updates, unless the norm is not finite. Returns whether it did, and the norm before.

    A draft layer has a norm of its own, by which it alone is clipped: it shall not shorten the steps of the policy.

    Megatron's own ``step`` would update with NaN: it looks for it only when it scales the loss.
    """
    drafts = any(is_draft(group) for part in optimizer.chained_optimizers for group in _groups(part))
    names = {False: "grad_norm"} | ({True: "mtp_grad_norm"} if drafts else {})
    if optimizer.prepare_grads():
        return False, dict.fromkeys(names.values(), math.nan)  # float16: overflowed, and the scale has been lowered
    norms = {name: _norm(optimizer, draft=draft) for draft, name in names.items()}
    if not all(map(math.isfinite, norms.values())):
        return False, norms
    for part in optimizer.chained_optimizers:
        for group in _groups(part) if part.config.clip_grad > 0 else ():
            norm = norms[names[is_draft(group)]]
            clip_grad_by_total_norm_fp32(group["params"], max_norm=part.config.clip_grad, total_norm=norm)
    return bool(optimizer.step_with_ready_grads()), norms


def _norm(optimizer: Any, *, draft: bool) -> float:
    """Of the gradients of the draft layer or of all others, over all ranks. Each counts once: see Megatron's
    ``MegatronOptimizer.get_main_grads_for_grad_norm``."""
    square = 0.0
    for part in optimizer.chained_optimizers:
        gradients = [
            p.grad
            for group in _groups(part)
            if is_draft(group) is draft
            for p in group["params"]
            if p.grad is not None
            and param_is_not_shared(p)
            and param_is_not_tensor_parallel_duplicate(p, getattr(part, "tp_group", None))
        ]
        square += get_grad_norm_fp32(gradients, grad_stats_parallel_group=part.get_grad_stats_parallel_group()) ** 2
    return math.sqrt(square)


def _groups(part: Any) -> Sequence[dict[str, Any]]:
    """The parameter groups of one of Megatron's optimizers; none where all parameters are frozen."""
    return getattr(part.optimizer, "param_groups", ())


def total(parts: Sequence[Partial]) -> dict[str, float]:
    """Adds up the parts of all micro-batches and data-parallel ranks; the last pipeline stage tells the others.

    Context-parallel ranks have the same parts, which count once.

    Raises:
        UserError: they are not of the same metrics, of which a custom function can name some.
    """
    _check_names(parts)
    sums = _combined([part.sums for part in parts], torch.sum, dist.ReduceOp.SUM)
    maxima = _combined([part.maxima for part in parts], torch.amax, dist.ReduceOp.MAX)
    message = [sums | maxima]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(message, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return message[0]


def _check_names(parts: Sequence[Partial]) -> None:
    """All micro-batches of all data-parallel ranks must have the same metrics, or their sums would be wrong or never
    come. Two numbers go over the wire, unless something is wrong."""
    if not parts:
        return
    group, kinds = parallel_state.get_data_parallel_group(), sorted({_names(part) for part in parts})
    digest = int.from_bytes(hashlib.sha256(repr(kinds).encode()).digest()[:6])
    extremes = torch.tensor([digest, -digest], device=_device(parts[0]))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, negated_smallest = extremes.tolist()
    if len(kinds) == 1 and largest == -negated_smallest:
        return
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, kinds, group=group)
    every = [set(names) for kinds in ranks for names in kinds]
    uneven = ", ".join(sorted(set.union(*every) - set.intersection(*every)))
    if parts[0].hook is not None:
        wrong = WrongAnswer(f"must return the same metrics for every micro-batch; only some have {uneven}")
        raise parts[0].hook.failure(wrong, "one step")
    raise UserError(f"only some micro-batches have {uneven}: samples must all have rollout_log_probs, or none")


def _names(part: Partial) -> tuple[str, ...]:
    return tuple(sorted(part.sums | part.maxima))


def _device(part: Partial) -> torch.device:
    return next(iter(part.sums.values())).device


def _combined(parts: Sequence[dict[str, Tensor]], combine: Callable[..., Tensor], operation: Any) -> dict[str, float]:
    """Every rank of the stage has the same names."""
    if not parts or not parts[0]:
        return {}
    names = list(parts[0])
    table = torch.stack([torch.stack([part[name].double() for name in names]) for part in parts])
    values = combine(table, 0)
    dist.all_reduce(values, op=operation, group=parallel_state.get_data_parallel_group())
    return dict(zip(names, values.tolist(), strict=True))
