"""One rank of the actor: the policy that learns, its reference, and its weights for the engines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from vime.algorithms import whitening
from vime.checkpoints import ResumePoint
from vime.config import Config
from vime.training.build import build_chunks, precision_fields
from vime.training.checkpoint import load_weights
from vime.training.estimates import advantages_of
from vime.training.forward import is_last_stage, log_probs_of
from vime.training.loss import Given, LossSettings, PolicyObjective
from vime.training.model_worker import (
    Clock,
    ModelWorker,
    is_hf_folder,
    resume_point,
    some_checkpoint,
    sum_over_data_parallel,
)
from vime.training.packing import MicroBatch
from vime.training.records import Export
from vime.training.replay import recorded
from vime.training.weight_sets import WeightSets
from vime.training.weights_io import drain, hf_plan, hf_weights, load_hf_weights, save_hf
from vime.types import TokenScores, TrainBatch, TrainSample, TrainStep
from vime.weights.plan import WeightPlan
from vime.weights.shm import SharedBuffer

__all__ = ["TrainWorker"]

REFERENCE = "ref"

LogProbs: TypeAlias = Sequence[Tensor | None]
"""Of each micro-batch; None where nobody has computed them."""


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

    def score(self, batch: TrainBatch) -> dict[int, TokenScores]:
        """Log-probs of actor and reference, by the index of the sample; see ``CriticWorker.score``."""
        packs = [pack for step in self._packs(batch) for pack in step]
        with self._weight_sets.use(REFERENCE):
            of_reference = self._by_sample(batch, self._log_probs(packs, "ref_"))
        own = self._by_sample(batch, self._log_probs(packs, ""))
        return {index: TokenScores(log_probs=own[index], ref_log_probs=of_reference[index]) for index in own}

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
        chunks = build_chunks(self.shape, self.config, provide=self._hooks.provide)
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
            load_weights(some_checkpoint(source, ckpt_step).directory, self.chunks)

    def _total_steps(self) -> int:
        """Without those of the rollouts in which only the critic learns."""
        rollouts = self._rollouts()
        if self.config.algorithm.needs_critic:
            rollouts = max(rollouts - self.config.critic.num_critic_only_steps, 0)
        return rollouts * self.config.batch.num_steps_per_rollout

    def _given(self, packs: Sequence[MicroBatch], clock: Clock) -> list[Given]:
        """Advantages and the log-probs of the other policies, before any weight moves."""
        old, ref = self._policies(packs, clock)
        if not is_last_stage():
            return [Given(advantages_t=pack.rewards_n) for pack in packs]  # nobody reads them
        return [
            Given(advantages_t=advantage, old_log_probs_t=old_log_probs, ref_log_probs_t=ref_log_probs)
            for advantage, old_log_probs, ref_log_probs in zip(self._advantages(packs, old, ref), old, ref, strict=True)
        ]

    def _policies(self, packs: Sequence[MicroBatch], clock: Clock) -> tuple[LogProbs, LogProbs]:
        """Log-probs of the actor before the update and of the reference, where they are needed.

        With one step a rollout the old policy is the one that the step differentiates, so it needs no pass of its own,
        unless the pass is to choose routes. The reference routes for itself: it goes first, and leaves no routes. What
        ``score`` has found in a pass without routes is not computed again.
        """
        scored = all(pack.scores.log_probs_t is not None for pack in packs)
        ref: LogProbs = [pack.scores.ref_log_probs_t for pack in packs]
        old: LogProbs = [pack.scores.log_probs_t for pack in packs]
        algorithm = self.config.algorithm
        if REFERENCE in self._weight_sets and not scored:
            with clock.phase("ref_log_probs"), self._weight_sets.use(REFERENCE):
                ref = self._log_probs(packs, "ref_")
        replayed = algorithm.use_routing_replay
        wanted = self.config.batch.num_steps_per_rollout > 1 or algorithm.kl_coef or self._hooks.want_log_probs
        if replayed or (wanted and not scored):
            with clock.phase("log_probs"), recorded(packs) if replayed else nullcontext():
                old = self._log_probs(packs, "")
        return old, ref

    def _reviewed(
        self, batch: TrainBatch, packs: Sequence[MicroBatch], given: Sequence[Given]
    ) -> tuple[Sequence[MicroBatch], Sequence[Given], Sequence[TrainStep]]:
        return self._hooks.reviewed(batch, packs, given, last_stage=is_last_stage())

    def _log_probs(self, packs: Sequence[MicroBatch], prefix: str | None = None) -> LogProbs:
        """Empty-handed on all but the last pipeline stage: None of every pack.

        Args:
            prefix: of what the result is called; None: a probe, of which no hook hears.
        """
        if prefix is not None:
            self._hooks.before_log_probs(self.chunks, prefix)
        answers = log_probs_of(self.chunks, packs, self.config.rollout.rollout_temperature)
        return [answer.log_probs_t for answer in answers] or [None] * len(packs)

    def _advantages(self, packs: Sequence[MicroBatch], old: LogProbs, ref: LogProbs) -> list[Tensor]:
        algorithm = self.config.algorithm
        found = [
            advantages_of(pack, algorithm, log_probs_t=old_log_probs, ref_log_probs_t=ref_log_probs)
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
