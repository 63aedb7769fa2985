"""One rank of a model that learns, from a configuration to its checkpoints: what actor and critic have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from vime.checkpoints import CheckpointStore, ResumePoint, older_may_do
from vime.config import Config
from vime.errors import UserError
from vime.models import ModelShape, load_shape
from vime.naming import rollout_name
from vime.platform import current
from vime.training.build import build_optimizer, build_scheduler, make_rope, precision_fields
from vime.training.checkpoint import load_megatron, save_megatron
from vime.training.forward import is_last_stage
from vime.training.hooks import TrainHooks
from vime.training.layers.attention import tree_tokens
from vime.training.ledger import held_bytes
from vime.training.offload import Offloader, Part
from vime.training.optimizer_kind import forget_moments
from vime.training.packing import MicroBatch, Packer
from vime.training.parallel import connect, context_part, disconnect, pack_multiple
from vime.training.records import StartInfo
from vime.training.saving import saving
from vime.training.step import Learner, Objective, gather_parameters
from vime.types import Role, TokenScores, TrainBatch, TrainResult, TrainStep

__all__ = ["Clock", "ModelWorker", "max_over_ranks", "sum_over_data_parallel"]

G = TypeVar("G")


class ModelWorker(ABC, Generic[G]):
    """A plain class, for any process. ``start`` first; every other method is collective: all ranks call it alike.

    A subclass says which model it is, where its weights come from, and what it learns: ``G`` is what is known of the
    tokens of a micro-batch before the training pass.
    """

    role: ClassVar[Role]
    metrics_prefix: ClassVar[str]

    def __init__(self, config: Config, *, rank: int, world_size: int, master_addr: str, master_port: int) -> None:
        self.config = config
        self._place = {"rank": rank, "world_size": world_size, "master_addr": master_addr, "master_port": master_port}

    @abstractmethod
    def _build(self) -> list[Any]:
        """The model chunks of this rank, without weights."""

    @abstractmethod
    def _objective(self) -> Objective[G]:
        """What a step minimises."""

    def _prepared(self) -> AbstractContextManager[None]:
        """Inside, the passes of a step have what they need."""
        return nullcontext()

    @abstractmethod
    def _resume_point(self) -> ResumePoint | None:
        """The checkpoint to go on from, if there is one."""

    @abstractmethod
    def _load_start(self, resume: ResumePoint | None) -> None:
        """Weights, before the optimizer copies them. A checkpoint with all that belongs to one is read afterwards."""

    @abstractmethod
    def _total_steps(self) -> int:
        """Optimizer steps of the whole run, over which learning rates decay."""

    @abstractmethod
    def _given(self, batch: TrainBatch, packs: Sequence[MicroBatch], clock: Clock) -> list[G]:
        """What training needs to know of each micro-batch, computed before any weight moves."""

    @abstractmethod
    def score(self, batch: TrainBatch) -> dict[int, TokenScores]:
        """What the model says of this rank's samples before it learns from them, by their index.

        Of the ranks that share samples one has the answer.
        """

    def start(self) -> StartInfo:
        """Joins the other ranks, builds the model and loads weights and optimizer state.

        Raises:
            UserError: a model or checkpoint cannot be loaded; the message says which and why.
        """
        config = self.config
        self._hooks = TrainHooks(config, self.role)
        self._device = connect(config, **self._place)  # type: ignore[arg-type]
        self._hooks.connected()
        self.shape = self._shape()
        self.chunks = self._build()
        resume = self._load_all()
        self._offloader = Offloader(self.chunks, self.optimizer)
        self._packer = self._make_packer()
        self._learner = Learner(
            chunks=self.chunks,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            objective=self._objective(),
            prefix=self.metrics_prefix,
            prepared=self._prepared,
            updating=self._offloader.arrive,
        )
        return self._start_info(resume)

    def train(self, batch: TrainBatch) -> TrainResult:
        """Learns from this rank's share of a rollout; every rank returns the same metrics, one dict a step."""
        clock = Clock()
        current().reset_peak_memory()
        with clock.phase("pack"):
            steps = self._packs(batch)
        self._offloader.fetch()
        packs: Sequence[MicroBatch] = [pack for step in steps for pack in step]
        packs, given, train_steps = self._reviewed(batch, packs, self._given(batch, packs, clock))
        works = iter(zip(packs, given, strict=True))
        with clock.phase("train"):
            metrics = [
                self._step(batch.rollout_id, i, [next(works) for _ in packed], step)
                for i, (packed, step) in enumerate(zip(steps, train_steps, strict=True))
            ]
            gather_parameters(self.chunks)
        if self.config.algorithm.reset_optimizer_states:
            forget_moments(self.optimizer)
        tokens = torch.tensor(float(sum(sample.total_length for sample in batch.samples)), dtype=torch.float64)
        metrics[-1] |= clock.metrics(self.role, float(sum_over_data_parallel(tokens)))
        return TrainResult(steps=tuple(metrics), seconds=clock.seconds, memory=self._memory())

    def _memory(self) -> dict[str, float]:
        """GiB on the fullest rank: what is held for what, and the most that training took at once."""
        held = {name: size / 2**30 for name, size in held_bytes(self.chunks, self.optimizer).items()}
        here = held | {"train_peak": current().memory_gib()["peak"]}
        fullest = max_over_ranks(torch.tensor(list(here.values()), dtype=torch.float64))
        return {f"memory/{self.role}/{name}": value for name, value in zip(here, fullest.tolist(), strict=True)}

    def memory_gib(self) -> float:
        """What this process holds now: of its device, or on a CPU of the machine's memory. Not collective."""
        return current().memory_gib()["allocated"]

    def free_bytes(self) -> int:
        """What nobody holds of this rank's device. Not collective."""
        return current().free_bytes()

    def _reviewed(
        self, batch: TrainBatch, packs: Sequence[MicroBatch], given: Sequence[G]
    ) -> tuple[Sequence[MicroBatch], Sequence[G], Sequence[TrainStep]]:
        """What is trained on, where somebody may still change it."""
        return packs, given, batch.steps

    def _step(
        self, rollout_id: int, number: int, work: Sequence[tuple[MicroBatch, G]], step: TrainStep
    ) -> dict[str, float]:
        if self._hooks.see_optimizer:
            self._offloader.arrive()
        self._hooks.before_step(rollout_id, number, self.chunks, self.optimizer, self.scheduler)
        return self._learner.step(work, step, name=f"step {number + 1} of {rollout_name(rollout_id)}")

    def prepare_to_leave(self) -> None:
        """Begins to make the host memory that ``offload`` needs, and returns at once."""
        self._offloader.prepare()

    def shed(self) -> int:
        """Drops gradients and gives back what nothing uses, until ``onload``; returns what nobody holds of the device,
        in bytes."""
        self._offloader.shed()
        return self.free_bytes()

    def begin_offload(self, part: Part) -> None:
        """Starts to copy that part of the state to the host; nothing is trained before ``onload``."""
        self._offloader.begin_offload(part)

    def offload(self, part: Part) -> None:
        """Frees the device memory of that part of the state until ``onload``."""
        self._offloader.offload(part)

    def onload(self, part: Part) -> None:
        self._offloader.onload(part)

    def save(self, directory: Path | str) -> None:
        """Writes Megatron's part of a checkpoint into a folder that ``CheckpointStore.begin`` made.

        Raises:
            UserError: the disk is full, or does not take it for another reason.
        """
        self._offloader.arrive()
        checkpoint = self.config.checkpoint
        optimizer = None if checkpoint.no_save_optim else self.optimizer
        with saving(directory):
            save_megatron(directory, self.chunks, optimizer, self.scheduler, ckpt_format=checkpoint.ckpt_format)

    def stop(self) -> None:
        """Leaves the other ranks."""
        disconnect()

    def _load_all(self) -> ResumePoint | None:
        """Weights, optimizer and scheduler; what there is to resume wins over every start."""
        resume = self._resume_point()
        self._load_start(resume)
        self.optimizer = build_optimizer(self.chunks, self.config)
        self.scheduler = build_scheduler(self.optimizer, self.config, total_steps=self._total_steps())
        if resume is not None and not resume.weights_only:
            with older_may_do(resume.directory):
                load_megatron(resume.directory, self.chunks, self.optimizer, self.scheduler)
        return resume

    def _shape(self) -> ModelShape:
        return load_shape(self.config.checkpoint.hf_checkpoint)

    def _make_packer(self) -> Packer:
        rope, part, drafts = make_rope(self.shape, self.config), context_part(), self.shape.trained_mtp_layers > 0
        # only our attention knows branches, and balancing experts needs every token as often as it was sampled
        shares = rope is not None and part is None and not drafts and not self.config.megatron.get("moe_aux_loss_coeff")
        return Packer(
            device=self._device,
            dtype=precision_fields(self.config)["params_dtype"],
            rope=rope,
            multiple=pack_multiple(self.config.parallel),
            tree_tokens=tree_tokens() if shares else 0,
            part=part,
            ahead=drafts,
        )

    def _packs(self, batch: TrainBatch) -> list[list[MicroBatch]]:
        """The micro-batches of each step."""
        return [
            [self._packer.pack([batch.samples[i] for i in chosen]) for chosen in step.micro_batches]
            for step in batch.steps
        ]

    def _by_sample(self, batch: TrainBatch, values: Sequence[Tensor | None]) -> dict[int, tuple[float, ...]]:
        """What the last pipeline stage computed of each pack of a batch, by the index of the sample.

        Of the ranks that share a sample one has it: the first of the last pipeline stage.
        """
        first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
        if not (first and is_last_stage()) or any(each is None for each in values):
            return {}
        chosen = [batch.samples[i] for step in batch.steps for micro in step.micro_batches for i in micro]
        whole = torch.cat([each.cpu() for each in values if each is not None])
        parts = torch.split(whole, [sample.response_length for sample in chosen])
        return {sample.index: tuple(part.tolist()) for sample, part in zip(chosen, parts, strict=True)}

    def _rollouts(self) -> int:
        """Of the whole run."""
        rollouts = self.config.rollout.num_rollout
        assert rollouts is not None, "the driver knows how many rollouts the run has"
        return rollouts

    def _start_info(self, resume: ResumePoint | None) -> StartInfo:
        given = self.config.checkpoint.start_rollout_id
        following = 0 if resume is None else resume.next_rollout_id
        return StartInfo(
            start_rollout_id=following if given is None else given,
            dp_size=parallel_state.get_data_parallel_world_size(),
            dp_rank=parallel_state.get_data_parallel_rank(),
            is_reporter=dist.get_rank() == 0,
            dtype=self.config.parallel.dtype_name,
            resumed_from=None if resume is None else str(resume.directory),
            state=None if resume is None else resume.state,
        )


def is_hf_folder(source: str) -> bool:
    return (Path(source) / "config.json").is_file()


def resume_point(load: str | None, ckpt_step: int | None) -> ResumePoint | None:
    """What a root offers to go on from; a missing folder, or a Hugging Face one, is a fresh start."""
    return None if load is None or is_hf_folder(load) else CheckpointStore(load).resolve(ckpt_step)


def some_checkpoint(source: str, ckpt_step: int | None) -> ResumePoint:
    """The checkpoint of that step, or the newest, below a root which is no Hugging Face folder.

    Raises:
        UserError: there is none.
    """
    point = CheckpointStore(source).resolve(ckpt_step)
    if point is None:
        raise UserError(f"{source} is neither a Hugging Face folder nor the root of a checkpoint")
    return point


def sum_over_data_parallel(values: Tensor) -> Tensor:
    """Context-parallel ranks have the same samples, which count once."""
    total = values.to(current().device(), copy=True)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total


def max_over_ranks(value: Tensor) -> Tensor:
    """Of all ranks of the model."""
    largest = value.to(current().device(), copy=True)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        current().synchronize()
        self.seconds[name] = time.perf_counter() - start

    def metrics(self, role: Role, tokens: float) -> dict[str, float]:
        """What a rollout's training took; ``tokens`` are those of all ranks, prompts included."""
        train = self.seconds["train"]
        named = {f"perf/{role}_{name}_time": seconds for name, seconds in self.seconds.items()}
        return named | {f"perf/{role}_train_tokens_per_s": tokens / train}
