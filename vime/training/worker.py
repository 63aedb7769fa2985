"""One rank of the actor: the policy that learns, its reference, and its weights for the engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from vime.algorithms import whitening
from vime.algorithms.distillation import distilled, teacher_gap
from vime.checkpoints import ResumePoint, older_may_do
from vime.errors import UserError
from vime.files import writing
from vime.models import ModelShape
from vime.models.routes import RouteShape
from vime.training.build import actor_shape, build_chunks, precision_fields
from vime.training.checkpoint import load_weights, save_megatron
from vime.training.draft import DraftObjective, embedding_lent
from vime.training.estimates import advantages_of, drop_not_finite, drop_without_weight, weight_scales
from vime.training.forward import is_last_stage, log_probs_of
from vime.training.freezing import Selection
from vime.training.layers.moe import Router
from vime.training.loss import Given, importance_sampling, no_log_probs
from vime.training.model_worker import (
    Clock,
    ModelWorker,
    is_hf_folder,
    max_over_ranks,
    resume_point,
    some_checkpoint,
    sum_over_data_parallel,
)
from vime.training.outlet import WeightOutlet
from vime.training.packing import MicroBatch, Packer, RankRoutes
from vime.training.records import Export
from vime.training.replay import follow, recorded
from vime.training.sampled_weights import SampledWeights
from vime.training.saving import saving
from vime.training.step import Objective
from vime.training.weight_sets import WeightSets
from vime.training.weights_io import load_hf_weights, save_hf
from vime.types import TokenScores, TrainBatch, TrainResult, TrainSample, TrainStep, WeightVersion
from vime.weights.invitation import Invitation, SendReport
from vime.weights.plan import WeightPlan

__all__ = ["TrainWorker"]

REFERENCE = "ref"
TEACHER = "teacher"

LogProbs: TypeAlias = Sequence[Tensor | None]
"""Of each micro-batch; None where nobody has computed them."""


class TrainWorker(ModelWorker[Given]):
    """A rank of the actor."""

    role = "actor"
    metrics_prefix = "train/"

    def train(self, batch: TrainBatch) -> TrainResult:
        result = super().train(batch)
        if self._sampled is not None:
            self._sampled.moved()
        interval = self.config.algorithm.ref_update_interval
        if interval is not None and (batch.rollout_id + 1) % interval == 0:
            self._weight_sets.keep(REFERENCE)
        return result

    def save(self, directory: Path | str) -> None:
        """With a reference that changes in the run, that too."""
        super().save(directory)
        if self.config.algorithm.ref_update_interval is not None:
            place = Path(directory) / REFERENCE
            with writing(place):
                place.mkdir(exist_ok=True)
            dist.barrier()
            with self._weight_sets.use(REFERENCE), saving(place):
                save_megatron(place, self.chunks, ckpt_format=self.config.checkpoint.ckpt_format)

    def export_weights(self, version: WeightVersion | None = None, *, on_device: bool = False) -> Export | None:
        """Writes the weights, under their HF names, where engines on this machine can map them; None beside rank 0.

        Args:
            version: which the engines will have; the next one by default.
            on_device: where there is room, on the devices, for engines that share them; until ``drop_copy``.
        """
        self._weights_leave(version)
        return self._outlet.export(on_device=on_device)

    def drop_copy(self) -> None:
        """Frees what ``export_weights`` put on this rank's device; engines have read it. Not collective."""
        self._outlet.drop_copy()

    def weight_plan(self, version: WeightVersion | None = None) -> WeightPlan:
        """What the sync that begins now will carry. For each sync, on all ranks, before anything is paused."""
        self._weights_leave(version)
        return self._outlet.plan

    def invite_engines(self, address: str, members: int, timeout_s: float) -> Invitation:
        """Rank 0 alone: listens at ``address`` for processes of engines, which are to join a group."""
        return self._outlet.invite(address, members, timeout_s=timeout_s)

    def join_engines(self) -> None:
        """Rank 0 alone: waits for them. Raises PeerLost, WrongBytes."""
        self._outlet.join()

    def broadcast_weights(self, bucket_bytes: int) -> SendReport | None:
        """Sends the weights to the group, in buckets; None beside rank 0. Twice in a sync if an engine failed."""
        return self._outlet.broadcast(bucket_bytes)

    def _weights_leave(self, version: WeightVersion | None) -> None:
        if self._sampled is not None:
            self._sampled.exported(version)

    def log_probs_of(self, token_ids: Sequence[int], prompt_length: int) -> list[float]:
        """What the present weights say of the tokens after the prompt, in nats; empty beside the last stage."""
        pack = self._packer.pack([_as_sample(token_ids, prompt_length)])
        (log_probs,) = self._log_probs([pack])
        return [] if log_probs is None else log_probs.tolist()

    def score(self, batch: TrainBatch) -> dict[int, TokenScores]:
        """Log-probs of actor and reference, by the index of the sample; see ``CriticWorker.score``."""
        packs = [pack for step in self._packs(batch) for pack in step]
        own, ref = (self._by_sample(batch, values) for values in self._policies(packs, Clock()))
        return {index: TokenScores(log_probs=own[index], ref_log_probs=ref.get(index)) for index in own}

    def save_hf(self, directory: Path | str) -> None:
        """Writes a folder that transformers and vLLM load."""
        save_hf(directory, self.chunks, self.shape, self.config.checkpoint.hf_checkpoint)

    def stop(self) -> None:
        """Leaves the engines, and frees the shared memory, too."""
        if hasattr(self, "_outlet"):  # a rank whose model could not be built has none
            self._outlet.close()
        super().stop()

    def _build(self) -> list[Any]:
        chunks = build_chunks(self.shape, self.config, provide=self._hooks.provide, selection=Selection.of(self.config))
        self._weight_sets = WeightSets(chunks)
        self._sampled: SampledWeights | None = None
        self._outlet = WeightOutlet(chunks, self.shape, precision_fields(self.config)["params_dtype"])
        return chunks

    def _shape(self) -> ModelShape:
        return actor_shape(self.config)

    def _make_packer(self) -> Packer:
        packer = super()._make_packer()
        if not self.config.algorithm.use_rollout_routing_replay:
            return packer
        return dataclasses.replace(packer, routes=self._rank_routes())

    def _rank_routes(self) -> RankRoutes:
        """A draft layer, which comes behind all others, is in no rollout."""
        shape, group = RouteShape.of(self.shape), parallel_state.get_tensor_model_parallel_group()
        cut = self.config.parallel.sequence_parallel
        routers = [each for chunk in self.chunks for each in chunk.modules() if isinstance(each, Router)]
        columns = {layer + 1: column for column, layer in enumerate(shape.layers)}  # Megatron counts layers from 1
        return RankRoutes(
            columns={each.layer_number: columns[each.layer_number] for each in routers if each.layer_number in columns},
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            part=group.rank() if cut else 0,
            parts=group.size() if cut else 1,
        )

    def _objective(self) -> Objective[Given]:
        own = self._own_objective()
        if not self.shape.trained_mtp_layers:
            return own
        return DraftObjective(own, self.config.algorithm.mtp_loss_scaling_factor)

    def _own_objective(self) -> Objective[Given]:
        """What is minimised beside the loss of draft layers."""
        return self._hooks.objective(self.config)

    def _prepared(self) -> AbstractContextManager[None]:
        return embedding_lent(self.chunks) if self.shape.trained_mtp_layers else nullcontext()

    def _resume_point(self) -> ResumePoint | None:
        return resume_point(self.config.checkpoint.load, self.config.checkpoint.ckpt_step)

    def _load_start(self, resume: ResumePoint | None) -> None:
        """Weights of reference and actor."""
        checkpoint = self.config.checkpoint
        start = checkpoint.ref_load or checkpoint.hf_checkpoint
        if self.config.off_policy.keep_old_actor:
            first = 1 if resume is None else int((resume.state or {}).get("weight_version", 1))
            self._sampled = SampledWeights(self._weight_sets, first - 1)
        distillation = self.config.distillation
        if distillation.opd_teacher_load is not None:
            step = distillation.opd_teacher_ckpt_step
            self._load_weights(distillation.opd_teacher_load, step, "--opd-teacher-ckpt-step")
            self._weight_sets.keep(TEACHER)
        if self.config.algorithm.needs_reference or resume is None:
            changed = None if resume is None else resume.directory / REFERENCE
            if changed is not None and changed.is_dir():
                with older_may_do(changed.parent):
                    load_weights(changed, self.chunks)
            else:
                self._load_weights(start, checkpoint.ref_ckpt_step, "--ref-ckpt-step")
        if self.config.algorithm.needs_reference:
            self._weight_sets.keep(REFERENCE)
        if resume is None and checkpoint.load and is_hf_folder(checkpoint.load):
            load_hf_weights(self.chunks, self.shape, checkpoint.load)
        if resume is not None and resume.weights_only:
            with older_may_do(resume.directory):
                load_weights(resume.directory, self.chunks)

    def _load_weights(self, source: str, ckpt_step: int | None, step_flag: str) -> None:
        """From a Hugging Face folder or from the root of a torch_dist checkpoint."""
        if is_hf_folder(source):
            load_hf_weights(self.chunks, self.shape, source)
            return
        directory = some_checkpoint(source, ckpt_step).directory
        with older_may_do(directory, step_flag):
            load_weights(directory, self.chunks)

    def _total_steps(self) -> int:
        """Without those of the rollouts in which only the critic learns."""
        rollouts = self._rollouts()
        if self.config.algorithm.needs_critic:
            rollouts = max(rollouts - self.config.critic.num_critic_only_steps, 0)
        return rollouts * self.config.batch.num_steps_per_rollout

    def _given(self, batch: TrainBatch, packs: Sequence[MicroBatch], clock: Clock) -> list[Given]:
        """Advantages and the log-probs of the other policies, before any weight moves."""
        teacher = self._teacher(packs, clock)
        old, ref = self._policies(packs, clock)
        if not is_last_stage():
            return [Given(advantages_t=pack.rewards_n) for pack in packs]  # nobody reads them
        custom = self._hooks.advantages(batch, packs, log_probs=old, ref_log_probs=ref)
        found = self._advantages(packs, old, ref) if custom is None else custom.advantages
        gaps = self._gaps(packs, old, teacher)
        of_teacher: LogProbs = gaps or [None] * len(packs)
        if gaps is not None:
            coef = self.config.distillation.opd_kl_coef
            found = [distilled(advantages_t, gap_t, coef) for advantages_t, gap_t in zip(found, gaps, strict=True)]
        weighted = self.config.off_policy.use_tis
        dropped = [
            drop_not_finite(advantages_t, pack) + (drop_without_weight(pack) if weighted else 0)
            for advantages_t, pack in zip(found, packs, strict=True)
        ]
        if self.config.algorithm.normalize_advantages:
            found = _whitened(found, packs)
        scales = self._weight_scales(batch, packs, old)
        return [
            Given(
                advantages_t=advantages_t,
                old_log_probs_t=old_t,
                ref_log_probs_t=ref_t,
                teacher_gap_t=gap_t,
                weight_scale=scale,
                dropped=count,
            )
            for advantages_t, old_t, ref_t, gap_t, scale, count in zip(
                found, old, ref, of_teacher, scales, dropped, strict=True
            )
        ]

    def _weight_scales(self, batch: TrainBatch, packs: Sequence[MicroBatch], old: LogProbs) -> Sequence[Tensor | None]:
        off_policy = self.config.off_policy
        if not off_policy.tis_batch_normalize:
            return [None] * len(packs)
        return weight_scales(batch, packs, old, importance_sampling(off_policy), sum_over_data_parallel)

    def _teacher(self, packs: Sequence[MicroBatch], clock: Clock) -> LogProbs:
        """What the teacher says of the sampled tokens: here, or what it has said on its server."""
        if TEACHER not in self._weight_sets:
            return [pack.scores.teacher_log_probs_t for pack in packs]
        with clock.phase("teacher_log_probs"), self._weight_sets.use(TEACHER):
            return self._log_probs(packs, "teacher_")

    def _gaps(self, packs: Sequence[MicroBatch], old: LogProbs, teacher: LogProbs) -> Sequence[Tensor] | None:
        """How far the policy is from the teacher at each token; None without one."""
        if not self.config.distillation.use_opd:
            return None
        gaps = []
        for pack, old_log_probs_t, teacher_log_probs_t in zip(packs, old, teacher, strict=True):
            assert old_log_probs_t is not None, "a run with a teacher computes them"
            if teacher_log_probs_t is None:
                raise UserError(
                    f"samples {', '.join(map(str, pack.indices))}: not all of them have teacher_log_probs, which "
                    "--use-opd needs; the function that generates or grades samples must set them"
                )
            gaps.append(teacher_gap(old_log_probs_t, teacher_log_probs_t))
        return gaps

    def _policies(self, packs: Sequence[MicroBatch], clock: Clock) -> tuple[LogProbs, LogProbs]:
        """Log-probs of the actor before the update and of the reference, where they are needed.

        With one step a rollout the old policy is the one that the step differentiates, so it needs no pass of its own,
        unless the pass is to choose routes. The reference routes for itself: it goes first, and leaves no routes. What
        ``score`` has found in a pass that chose no routes is not computed again.
        """
        scored = all(pack.scores.log_probs_t is not None for pack in packs)
        ref: LogProbs = [pack.scores.ref_log_probs_t for pack in packs]
        old: list[Tensor | None] = [pack.scores.log_probs_t for pack in packs]
        algorithm, engine = self.config.algorithm, self.config.off_policy.use_rollout_logprobs
        if REFERENCE in self._weight_sets and not scored:
            with clock.phase("ref_log_probs"), self._weight_sets.use(REFERENCE):
                ref = self._log_probs(packs, "ref_")
        if algorithm.use_rollout_routing_replay:
            follow(packs)
        if passing := self._passing(packs, scored):
            replayed = algorithm.use_routing_replay or algorithm.use_rollout_routing_replay
            some = [packs[i] for i in passing]
            with clock.phase("log_probs"), self._sampling_actor(packs), recorded(some) if replayed else nullcontext():
                for i, log_probs_t in zip(passing, self._log_probs(some, ""), strict=True):
                    old[i] = log_probs_t
        for pack in packs if engine else ():
            if pack.rollout_log_probs_t is None:
                raise no_log_probs("--use-rollout-logprobs", pack)
        return [pack.rollout_log_probs_t for pack in packs] if engine else old, ref

    def _passing(self, packs: Sequence[MicroBatch], scored: bool) -> Sequence[int]:
        """The micro-batches that the actor computes log-probs of, and routes, before the update.

        Where a step meets other weights than those, tokens whose routes no engine told are to be routed before: then
        micro-batches with such tokens pass even though all log-probs are known.
        """
        algorithm, off_policy = self.config.algorithm, self.config.off_policy
        differs = self.config.batch.num_steps_per_rollout > 1 or off_policy.keep_old_actor
        wanted = differs or algorithm.kl_coef or self.config.distillation.use_opd
        wanted = (wanted and not off_policy.use_rollout_logprobs) or off_policy.tis_batch_normalize
        wanted = wanted or self._hooks.want_log_probs
        if algorithm.use_routing_replay or (wanted and not scored):
            return range(len(packs))
        return _with_gaps(packs) if algorithm.use_rollout_routing_replay and differs else ()

    def _sampling_actor(self, packs: Sequence[MicroBatch]) -> AbstractContextManager[None]:
        """The weights that these samples come from, where they are kept."""
        if self._sampled is None:
            return nullcontext()
        newest = torch.tensor(max((pack.newest_version or 0 for pack in packs), default=0))
        return self._sampled.use(int(max_over_ranks(newest)) or None)

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
        if algorithm.disable_compute_advantages_and_returns:
            return [torch.zeros_like(pack.mask_t, dtype=torch.float32) for pack in packs]
        return [
            advantages_of(pack, algorithm, log_probs_t=old_log_probs, ref_log_probs_t=ref_log_probs)
            for pack, old_log_probs, ref_log_probs in zip(packs, old, ref, strict=True)
        ]


def _with_gaps(packs: Sequence[MicroBatch]) -> list[int]:
    """The micro-batches of which some rank has a token without a route: all ranks compute the same ones together."""
    gaps = [pack.rollout_routes is not None and not pack.rollout_routes.complete for pack in packs]
    found: list[int] = max_over_ranks(torch.tensor(gaps, dtype=torch.int32)).nonzero().flatten().tolist()
    return found


def _whitened(found: Sequence[Tensor], packs: Sequence[MicroBatch]) -> list[Tensor]:
    masks = torch.cat([pack.mask_t for pack in packs])
    whitened = whitening.whiten(torch.cat(list(found)), masks, sum_over_ranks=sum_over_data_parallel)
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
