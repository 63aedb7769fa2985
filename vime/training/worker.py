"""One rank of the actor: the policy that learns, its reference, and its weights for the engines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vime.algorithms import whitening
from vime.algorithms.advantages import AdvantageSettings, PackedSamples
from vime.checkpoints import ResumePoint
from vime.config import Config
from vime.training.build import build_chunks, precision_fields
from vime.training.checkpoint import load_weights
from vime.training.forward import is_last_stage, log_probs_of
from vime.training.loss import Given, LossSettings, PolicyObjective
from vime.training.model_worker import (
    Clock,
    ModelWorker,
    is_hf_folder,
    load_checkpoint_weights,
    resume_point,
    sum_over_data_parallel,
)
from vime.training.packing import MicroBatch
from vime.training.records import Export
from vime.training.replay import recorded
from vime.training.weight_sets import WeightSets
from vime.training.weights_io import drain, hf_plan, hf_weights, load_hf_weights, save_hf
from vime.types import TrainSample
from vime.weights.plan import WeightPlan
from vime.weights.shm import SharedBuffer

__all__ = ["TrainWorker"]

REFERENCE = "ref"


class TrainWorker(ModelWorker[Given]):
    """A rank of the actor."""

    role = "actor"
    metrics_prefix = "train/"

    def __init__(self, config: Config, *, rank: int, world_size: int, master_addr: str, master_port: int) -> None:
        super().__init__(config, rank=rank, world_size=world_size, master_addr=master_addr, master_port=master_port)
        self._buffer: SharedBuffer | None = None

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

    def save_hf(self, directory: Path | str) -> None:
        """Writes a folder that transformers and vLLM load."""
        save_hf(directory, self.chunks, self.shape, self.config.checkpoint.hf_checkpoint)

    def stop(self) -> None:
        """Frees the shared memory too."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
        super().stop()

    def _build(self) -> list[Any]:
        chunks = build_chunks(self.shape, self.config)
        self._weight_sets = WeightSets(chunks)
        return chunks

    def _objective(self) -> PolicyObjective:
        return PolicyObjective(LossSettings.of(self.config), self.config.rollout.rollout_temperature)

    def _resume_point(self) -> ResumePoint | None:
        return resume_point(self.config.checkpoint.load, self.config.checkpoint.ckpt_step)

    def _load_start(self, resume: ResumePoint | None) -> None:
        """Weights of reference and actor."""
        checkpoint = self.config.checkpoint
        start = checkpoint.ref_load or checkpoint.hf_checkpoint
        if self.config.algorithm.needs_reference or resume is None:
            self._load_weights(start, checkpoint.ref_ckpt_step)
        if self.config.algorithm.needs_reference:
            self._weight_sets.keep(REFERENCE)
        if resume is None and checkpoint.load and is_hf_folder(checkpoint.load):
            load_hf_weights(self.chunks, self.shape, checkpoint.load)
        if resume is not None and resume.weights_only:
            load_weights(resume.directory, self.chunks)

    def _load_weights(self, source: str, ckpt_step: int | None) -> None:
        """From a Hugging Face folder or from the root of a torch_dist checkpoint."""
        if is_hf_folder(source):
            load_hf_weights(self.chunks, self.shape, source)
        else:
            load_checkpoint_weights(source, ckpt_step, self.chunks)

    def _total_steps(self) -> int:
        rollouts = self.config.rollout.num_rollout
        assert rollouts is not None, "the driver knows how many rollouts the run has"
        return rollouts * self.config.batch.num_steps_per_rollout

    def _given(self, packs: Sequence[MicroBatch], clock: Clock) -> list[Given]:
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
        settings = AdvantageSettings(
            gamma=algorithm.gamma,
            lambd=algorithm.lambd,
            kl_coef=algorithm.kl_coef,
            kl_kind=algorithm.kl_loss_type,
        )
        found = [
            algorithm.estimator.advantages(
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
        whitened = whitening.whiten(torch.cat(found), masks, sum_over_ranks=sum_over_data_parallel)
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
