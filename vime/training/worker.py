"""One rank of the trainer: from a configuration to a model that learns. A plain class, for any process."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from vime.algorithms import advantages, whitening
from vime.algorithms.advantages import AdvantageSettings, PackedSamples
from vime.checkpoints import CheckpointStore, ResumePoint
from vime.config import Config
from vime.errors import UserError
from vime.models import load_shape
from vime.platform import current
from vime.training.build import build_chunks, build_optimizer, build_scheduler, make_rope, precision_fields
from vime.training.checkpoint import load_megatron, load_weights, save_megatron
from vime.training.forward import is_last_stage, log_probs_of
from vime.training.layers.attention import tree_tokens
from vime.training.loss import Given, LossSettings
from vime.training.offload import Offloader, Part
from vime.training.packing import MicroBatch, Packer
from vime.training.parallel import connect, context_part, disconnect, pack_multiple
from vime.training.records import Export, StartInfo
from vime.training.replay import recorded
from vime.training.step import Learner, gather_parameters
from vime.training.weight_sets import WeightSets
from vime.training.weights_io import drain, hf_plan, hf_weights, load_hf_weights, save_hf
from vime.types import TrainBatch, TrainResult, TrainSample
from vime.weights.plan import WeightPlan
from vime.weights.shm import SharedBuffer

__all__ = ["TrainWorker"]

logger = logging.getLogger(__name__)

REFERENCE = "ref"


class TrainWorker:
    """A rank of the actor. ``start`` first; every other method is collective: all ranks call it alike."""

    def __init__(
        self,
        config: Config,
        *,
        rank: int,
        world_size: int,
        master_addr: str,
        master_port: int,
        role: Literal["actor"] = "actor",
    ) -> None:
        self.config, self.role = config, role
        self._place = {"rank": rank, "world_size": world_size, "master_addr": master_addr, "master_port": master_port}
        self._buffer: SharedBuffer | None = None

    def start(self) -> StartInfo:
        """Joins the other ranks, builds the model and loads weights, reference and optimizer state.

        Raises:
            UserError: a model or checkpoint cannot be loaded; the message says which and why.
        """
        config = self.config
        self._device = connect(config, **self._place)  # type: ignore[arg-type]
        self.shape = load_shape(config.checkpoint.hf_checkpoint)
        self.chunks = build_chunks(self.shape, config)
        self._weight_sets = WeightSets(self.chunks)
        resume = self._load_all()
        self._offloader = Offloader(self.chunks, self.optimizer)
        rope, part = make_rope(self.shape, config), context_part()
        self._packer = Packer(
            device=self._device,
            dtype=precision_fields(config)["params_dtype"],
            rope=rope,
            multiple=pack_multiple(config.parallel),
            tree_tokens=0 if rope is None or part is not None else tree_tokens(),  # only our attention knows branches
            part=part,
        )
        self._learner = Learner(
            chunks=self.chunks,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            settings=LossSettings.of(config),
            temperature=config.rollout.rollout_temperature,
        )
        return self._start_info(resume)

    def train(self, batch: TrainBatch) -> TrainResult:
        """Learns from this rank's share of a rollout; every rank returns the same metrics, one dict a step."""
        clock = _Clock()
        with clock.phase("pack"):
            steps = [
                [self._packer.pack([batch.samples[i] for i in chosen]) for chosen in step.micro_batches]
                for step in batch.steps
            ]
        packs = [pack for step in steps for pack in step]
        given = self._given(packs, clock)
        works = iter(zip(packs, given, strict=True))
        with clock.phase("train"):
            metrics = [
                self._learner.step([next(works) for _ in packed], step)
                for packed, step in zip(steps, batch.steps, strict=True)
            ]
            gather_parameters(self.chunks)
        tokens = torch.tensor(float(sum(sample.total_length for sample in batch.samples)), dtype=torch.float64)
        metrics[-1] |= clock.metrics(float(_sum_over_data_parallel(tokens)))
        return TrainResult(steps=tuple(metrics), seconds=clock.seconds)

    def export_weights(self) -> Export | None:
        """Writes the weights, under their HF names, where engines on this machine can map them; None beside rank 0."""
        dtype = precision_fields(self.config)["params_dtype"]
        weights = hf_weights(self.chunks, self.shape)
        if dist.get_rank() != 0:
            drain(weights)
            return None
        plan = WeightPlan.of((name, shape, str(kind)) for name, shape, kind in hf_plan(self.shape, dtype))
        if self._buffer is None:
            self._buffer = SharedBuffer(plan.total_bytes)
        self._buffer.write(plan, weights)
        return Export(plan=plan, path=self._buffer.path)

    def log_probs_of(self, token_ids: Sequence[int], prompt_length: int) -> list[float]:
        """What the present weights say of the tokens after the prompt, in nats; empty beside the last stage."""
        pack = self._packer.pack([_as_sample(token_ids, prompt_length)])
        (log_probs,) = self._log_probs([pack])
        return [] if log_probs is None else log_probs.tolist()

    def offload(self, part: Part) -> None:
        """Frees the device memory of that part of the state until ``onload``."""
        self._offloader.offload(part)

    def onload(self, part: Part) -> None:
        self._offloader.onload(part)

    def save(self, directory: Path | str) -> None:
        """Writes Megatron's part of a checkpoint into a folder that ``CheckpointStore.begin`` made."""
        optimizer = None if self.config.checkpoint.no_save_optim else self.optimizer
        save_megatron(directory, self.chunks, optimizer, self.scheduler, ckpt_format=self.config.checkpoint.ckpt_format)

    def save_hf(self, directory: Path | str) -> None:
        """Writes a folder that transformers and vLLM load."""
        save_hf(directory, self.chunks, self.shape, self.config.checkpoint.hf_checkpoint)

    def stop(self) -> None:
        """Leaves the other ranks and frees the shared memory."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
        disconnect()

    def _load_all(self) -> ResumePoint | None:
        """Weights of reference and actor, optimizer and scheduler; what there is to resume wins over every start."""
        checkpoint = self.config.checkpoint
        resume = _resume_point(checkpoint.load, checkpoint.ckpt_step)
        start = checkpoint.ref_load or checkpoint.hf_checkpoint
        if self.config.algorithm.needs_reference or resume is None:
            self._load_weights(start, checkpoint.ref_ckpt_step)
        if self.config.algorithm.needs_reference:
            self._weight_sets.keep(REFERENCE)
        if resume is None and checkpoint.load and (Path(checkpoint.load) / "config.json").is_file():
            load_hf_weights(self.chunks, self.shape, checkpoint.load)
        if resume is not None and resume.weights_only:
            load_weights(resume.directory, self.chunks)
        self.optimizer = build_optimizer(self.chunks, self.config)
        self.scheduler = build_scheduler(self.optimizer, self.config, total_steps=self._total_steps())
        if resume is not None and not resume.weights_only:
            load_megatron(resume.directory, self.chunks, self.optimizer, self.scheduler)
        return resume

    def _load_weights(self, source: str, ckpt_step: int | None) -> None:
        """From a Hugging Face folder or from the root of a torch_dist checkpoint."""
        if (Path(source) / "config.json").is_file():
            load_hf_weights(self.chunks, self.shape, source)
            return
        point = CheckpointStore(source).resolve(ckpt_step)
        if point is None:
            raise UserError(f"{source} is neither a Hugging Face folder nor the root of a checkpoint")
        load_weights(point.directory, self.chunks)

    def _total_steps(self) -> int:
        rollouts = self.config.rollout.num_rollout
        assert rollouts is not None, "the driver knows how many rollouts the run has"
        return rollouts * self.config.batch.num_steps_per_rollout

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

    def _given(self, packs: Sequence[MicroBatch], clock: _Clock) -> list[Given]:
        """Advantages and the log-probs of the other policies, before any weight moves.

        With one step a rollout the old policy is the one that the step differentiates, so it needs no pass of its own,
        unless the pass is to choose routes. The reference routes for itself: it goes first, and leaves no routes.
        """
        ref: list[Tensor] | list[None] = [None] * len(packs)
        old = ref
        if REFERENCE in self._weight_sets:
            with clock.phase("ref_log_probs"), self._weight_sets.use(REFERENCE):
                ref = self._log_probs(packs)
        algorithm = self.config.algorithm
        replayed = algorithm.use_routing_replay
        if self.config.batch.num_steps_per_rollout > 1 or algorithm.kl_coef or replayed:
            with clock.phase("log_probs"), recorded(packs) if replayed else nullcontext():
                old = self._log_probs(packs)
        if not is_last_stage():
            return [Given(advantages_t=pack.rewards_n) for pack in packs]  # nobody reads them
        return [
            Given(advantages_t=advantage, old_log_probs_t=old_log_probs, ref_log_probs_t=ref_log_probs)
            for advantage, old_log_probs, ref_log_probs in zip(self._advantages(packs, old, ref), old, ref, strict=True)
        ]

    def _log_probs(self, packs: Sequence[MicroBatch]) -> list[Tensor] | list[None]:
        answers = log_probs_of(self.chunks, packs, self.config.rollout.rollout_temperature)
        return [answer.log_probs_t for answer in answers] or [None] * len(packs)

    def _advantages(
        self, packs: Sequence[MicroBatch], old: Sequence[Tensor | None], ref: Sequence[Tensor | None]
    ) -> list[Tensor]:
        algorithm = self.config.algorithm
        estimator = advantages.get(algorithm.advantage_estimator)
        settings = AdvantageSettings(kl_coef=algorithm.kl_coef, kl_kind=algorithm.kl_loss_type)
        found = [
            estimator.advantages(
                PackedSamples(
                    rewards_n=pack.rewards_n,
                    lengths_n=pack.lengths_n,
                    mask_t=pack.mask_t,
                    log_probs_t=old_log_probs,
                    ref_log_probs_t=ref_log_probs,
                ),
                settings,
            )
            for pack, old_log_probs, ref_log_probs in zip(packs, old, ref, strict=True)
        ]
        if not algorithm.normalize_advantages:
            return found
        masks = torch.cat([pack.mask_t for pack in packs])
        whitened = whitening.whiten(torch.cat(found), masks, sum_over_ranks=_sum_over_data_parallel)
        return list(torch.split(whitened, [len(advantage) for advantage in found]))


def _as_sample(token_ids: Sequence[int], prompt_length: int) -> TrainSample:
    """A text as if it were to be trained on."""
    length = len(token_ids) - prompt_length
    return TrainSample(
        index=0,
        group_index=0,
        tokens=tuple(token_ids),
        response_length=length,
        loss_mask=(1,) * length,
        rollout_log_probs=None,
        weight_versions=(),
        raw_reward=0.0,
        reward=0.0,
    )


def _resume_point(load: str | None, ckpt_step: int | None) -> ResumePoint | None:
    """What ``--load`` offers to go on from; a missing folder, or a Hugging Face one, is a fresh start."""
    if load is None or (Path(load) / "config.json").is_file():
        return None
    return CheckpointStore(load).resolve(ckpt_step)


def _sum_over_data_parallel(values: Tensor) -> Tensor:
    """Context-parallel ranks have the same samples, which count once."""
    total = values.to(current().device(), copy=True)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total


class _Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        current().synchronize()
        self.seconds[name] = time.perf_counter() - start

    def metrics(self, tokens: float) -> dict[str, float]:
        """What a rollout's training took; ``tokens`` are those of all ranks, prompts included."""
        train = self.seconds["train"]
        named = {f"perf/actor_{name}_time": seconds for name, seconds in self.seconds.items()}
        return named | {"perf/actor_train_tokens_per_s": tokens / train}
