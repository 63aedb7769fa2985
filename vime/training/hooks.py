"""The custom functions that run on this rank, each with what its contract says."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from vime.config import Config
from vime.naming import rollout_name
from vime.plugins import WrongAnswer, losses, resolve_hooks
from vime.plugins import training as contracts
from vime.plugins.contract import read_nothing, shown
from vime.plugins.tensors import token_rows
from vime.training.build import BuildModel
from vime.training.loss import Given, LossSettings, PolicyObjective
from vime.training.loss_hooks import CustomCorrection, CustomMean, CustomObjective
from vime.training.packing import MicroBatch
from vime.training.rollout_data import Rows, rollout_data
from vime.training.step import Objective
from vime.types import Role, TrainBatch, TrainStep

__all__ = ["Estimates", "TrainHooks"]


class Estimates(NamedTuple):
    """What a user's function makes of a rollout, a tensor [T] of each micro-batch."""

    advantages: list[Tensor]
    returns: list[Tensor] | None  # what a critic is to learn; None: advantages and values together


class TrainHooks:
    """Resolved once, when the rank starts."""

    def __init__(self, config: Config, role: Role) -> None:
        hooks = resolve_hooks(config, "training")
        self.args = config.args.extended(role=role)
        self._init = hooks.get(contracts.CUSTOM_MEGATRON_INIT)
        self._provide = hooks.get(contracts.CUSTOM_MODEL_PROVIDER)
        self._before_log_probs = hooks.get(contracts.CUSTOM_MEGATRON_BEFORE_LOG_PROB)
        self._postprocess = hooks.get(contracts.ROLLOUT_DATA_POSTPROCESS)
        self._before_step = hooks.get(contracts.CUSTOM_MEGATRON_BEFORE_TRAIN_STEP)
        self._advantages = hooks.get(losses.CUSTOM_ADVANTAGE)
        self._tis = hooks.get(losses.CUSTOM_TIS)
        self._reducer = hooks.get(losses.CUSTOM_PG_LOSS_REDUCER)
        self._loss = hooks.get(losses.CUSTOM_LOSS)

    @property
    def want_log_probs(self) -> bool:
        """Whether the policy's own log-probs must be computed, also where training can do without."""
        return any(hook is not None for hook in (self._postprocess, self._advantages, self._loss))

    def objective(self, config: Config) -> Objective[Given]:
        """What a policy learns: the usual loss with the user's parts in it, or a loss of the user's."""
        per_token = config.batch.calculate_per_token_loss
        if config.algorithm.loss_type == "custom_loss":
            assert self._loss is not None, "a rule says so"
            return CustomObjective(self._loss, self.args, per_token)
        settings = LossSettings.of(
            config,
            correct=CustomCorrection(self._tis, self.args) if self._tis else None,
            make_mean=CustomMean(self._reducer, per_token) if self._reducer else None,
        )
        return PolicyObjective(settings, config.rollout.rollout_temperature)

    def advantages(
        self, batch: TrainBatch, packs: Sequence[MicroBatch], **known: Sequence[Tensor | None]
    ) -> Estimates | None:
        """What the user's function makes of the rollout; None without a function.

        Args:
            known: values of response tokens by name, of each micro-batch.
        """
        if self._advantages is None:
            return None
        data = rollout_data(batch, packs, **known)  # type: ignore[arg-type]
        lengths = [sample.response_length for sample in batch.samples]

        def read(answer: Any) -> dict[str, list[Tensor]]:
            read_nothing(answer)
            names = [name for name in losses.ESTIMATES if name == "advantages" or name in data]
            return {name: token_rows(data, name, lengths, finite=False) for name in names}  # such samples are left out

        about = f"{rollout_name(batch.rollout_id)}, {_rank()}"
        found = self._advantages.call(self.args, data, about=about, read=read)
        joined = {name: Rows.of(batch).join(rows) for name, rows in found.items()}
        return Estimates(joined["advantages"], joined.get("returns"))

    def connected(self) -> None:
        """Megatron's process groups stand."""
        if self._init is not None:
            self._init.call(self.args, about=_rank(), read=read_nothing)

    def provide(self, build: BuildModel, first: bool, last: bool, virtual_stage: int | None) -> Any:
        """A chunk of the model: what ``build`` makes, or what the user's function makes of it."""
        if self._provide is None:
            return build(first, last, virtual_stage)
        made: list[Any] = []

        def noted(*stage: Any) -> Any:
            made.append(build(*stage))
            return made[-1]

        def read(answer: Any) -> Any:
            if answer not in made:
                raise WrongAnswer(f"must return the model that build(…) made, not {shown(answer)}")
            return answer

        optional = {"args": self.args, "build": noted}
        taken = {name: value for name, value in optional.items() if self._provide.takes(name)}
        return self._provide.call(first, last, virtual_stage, **taken, about=_rank(), read=read)

    def before_log_probs(self, chunks: Sequence[Any], prefix: str) -> None:
        """A pass without gradients over a rollout follows."""
        if self._before_log_probs is not None:
            about = f"{prefix}log_probs, {_rank()}"
            self._before_log_probs.call(self.args, list(chunks), prefix, about=about, read=read_nothing)

    @property
    def see_optimizer(self) -> bool:
        """Whether a function of the user's gets the optimizer before each step."""
        return self._before_step is not None

    def before_step(self, rollout_id: int, step: int, chunks: Sequence[Any], optimizer: Any, scheduler: Any) -> None:
        """An optimizer step follows."""
        if self._before_step is not None:
            about = f"step {step + 1} of {rollout_name(rollout_id)}, {_rank()}"
            self._before_step.call(
                self.args, rollout_id, step, list(chunks), optimizer, scheduler, about=about, read=read_nothing
            )

    def reviewed(
        self, batch: TrainBatch, packs: Sequence[MicroBatch], given: Sequence[Given], *, last_stage: bool
    ) -> tuple[Sequence[MicroBatch], Sequence[Given], Sequence[TrainStep]]:
        """Micro-batches, what is known of them, and the steps, after the user's function has seen the rollout.

        Masks that it changed count in the denominators as if they had come that way.
        """
        if self._postprocess is None:
            return packs, given, batch.steps
        known = {
            "log_probs": [each.old_log_probs_t for each in given],
            "ref_log_probs": [each.ref_log_probs_t for each in given],
            "advantages": [each.advantages_t for each in given],
        }
        data = rollout_data(batch, packs, **known if last_stage else {})  # type: ignore[arg-type]
        names = [name for name in contracts.READ_BACK if name in data]
        before = {name: [row.clone() for row in data[name]] for name in names}
        lengths = [sample.response_length for sample in batch.samples]

        def read(answer: Any) -> dict[str, list[Tensor]]:
            read_nothing(answer)
            return {name: token_rows(data, name, lengths, before=before[name]) for name in names}

        about = f"{rollout_name(batch.rollout_id)}, {_rank()}"
        found = self._postprocess.call(self.args, batch.rollout_id, data, about=about, read=read)
        rows = Rows.of(batch)
        joined = {name: rows.join(tensors) for name, tensors in found.items()}
        masks = rows.split([pack.mask_t for pack in packs])
        packs, given = _replaced(packs, given, joined)
        return (
            _with_siblings(batch, packs, masks, found["loss_masks"]),
            given,
            _recounted(batch, masks, found["loss_masks"]),
        )


def _replaced(
    packs: Sequence[MicroBatch], given: Sequence[Given], joined: dict[str, list[Tensor]]
) -> tuple[list[MicroBatch], list[Given]]:
    """With the tensors of ``joined`` in place of their own."""
    of_packs = {"loss_masks": "mask_t", "rollout_log_probs": "rollout_log_probs_t"}
    of_given = {"advantages": "advantages_t", "log_probs": "old_log_probs_t", "ref_log_probs": "ref_log_probs_t"}
    return (
        [dataclasses.replace(pack, **_fields(of_packs, joined, i)) for i, pack in enumerate(packs)],
        [dataclasses.replace(each, **_fields(of_given, joined, i)) for i, each in enumerate(given)],
    )


def _fields(names: dict[str, str], joined: dict[str, list[Tensor]], place: int) -> dict[str, Any]:
    return {field: joined[name][place] for name, field in names.items() if name in joined}


def _recounted(batch: TrainBatch, before: Sequence[Tensor], after: Sequence[Tensor]) -> list[TrainStep]:
    """The steps with the tokens that the changed masks (one a sample) leave, over all data-parallel ranks."""
    differences = [
        sample.counts * (max(int(new.sum()), 1) - max(int(old.sum()), 1))
        for sample, old, new in zip(batch.samples, before, after, strict=True)
    ]
    own = [sum(differences[i] for micro in step.micro_batches for i in micro) for step in batch.steps]
    total = torch.tensor(own, dtype=torch.int64, device=before[0].device)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return [
        dataclasses.replace(step, num_tokens=max(step.num_tokens + difference, 1))
        for step, difference in zip(batch.steps, total.tolist(), strict=True)
    ]


def _with_siblings(
    batch: TrainBatch, packs: Sequence[MicroBatch], before: Sequence[Tensor], after: Sequence[Tensor]
) -> Sequence[MicroBatch]:
    """Micro-batches whose samples know what the changed masks leave of their siblings, on whatever rank those are."""
    children = {
        sample.index: (sample.origin, int(new.sum()) - int(old.sum()))
        for sample, old, new in zip(batch.samples, before, after, strict=True)
        if sample.parent_index is not None
    }
    group = parallel_state.get_data_parallel_group()
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, list(children.values()), group=group)
    families: Counter[int] = Counter()
    for parent, change in itertools.chain.from_iterable(ranks):
        families[parent] += change
    of_siblings = {index: families[parent] - change for index, (parent, change) in children.items()}
    changes = (torch.tensor([of_siblings.get(index, 0) for index in pack.indices]) for pack in packs)
    return [
        dataclasses.replace(pack, sibling_tokens_n=pack.sibling_tokens_n + change.to(pack.sibling_tokens_n))
        for pack, change in zip(packs, changes, strict=True)
    ]


def _rank() -> str:
    return f"rank {dist.get_rank()}"
