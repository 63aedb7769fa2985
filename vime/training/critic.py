"""One rank of the critic, which learns to tell what each token of an answer leads to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from vime.checkpoints import CRITIC, ResumePoint, older_may_do
from vime.errors import UserError
from vime.training.build import build_chunks
from vime.training.checkpoint import load_weights
from vime.training.estimates import advantages_of, drop_not_finite
from vime.training.forward import is_last_stage, outputs_of
from vime.training.model_worker import Clock, ModelWorker, is_hf_folder, resume_point, some_checkpoint
from vime.training.packing import MicroBatch
from vime.training.value_model import HEAD, ValueModel, values_of_chunk
from vime.training.value_objective import Goal, ValueObjective, with_explained_variance
from vime.training.weights_io import load_hf_weights
from vime.types import TokenScores, TrainBatch, TrainResult

__all__ = ["CriticWorker"]


class CriticWorker(ModelWorker[Goal]):
    """A rank of the critic. Its configuration is ``vime.config.roles.critic_config``'s."""

    role = "critic"
    metrics_prefix = "train/critic_"

    def score(self, batch: TrainBatch) -> dict[int, TokenScores]:
        """The values of this rank's samples, by their index; every rank but one of those that share them has none."""
        packs = [pack for step in self._packs(batch) for pack in step]
        values = outputs_of(self.chunks, packs, values_of_chunk)
        return {index: TokenScores(values=found) for index, found in self._by_sample(batch, values).items()}

    def train(self, batch: TrainBatch) -> TrainResult:
        """Learns the returns of samples that have been scored, by the critic and where it takes that by the actor."""
        result = super().train(batch)
        return replace(result, steps=tuple(with_explained_variance(metrics) for metrics in result.steps))

    def _build(self) -> list[Any]:
        return build_chunks(self.shape, self.config, model=ValueModel, provide=self._hooks.provide)

    def _objective(self) -> ValueObjective:
        return ValueObjective(self.config.critic.value_clip, self.config.batch.calculate_per_token_loss)

    def _total_steps(self) -> int:
        return self._rollouts() * self.config.batch.num_steps_per_rollout

    def _given(self, batch: TrainBatch, packs: Sequence[MicroBatch], clock: Clock) -> list[Goal]:
        if not is_last_stage():
            return [Goal(old_values_t=pack.rewards_n, returns_t=pack.rewards_n) for pack in packs]  # nobody reads them
        log_probs = [pack.scores.log_probs_t for pack in packs]
        ref_log_probs = [pack.scores.ref_log_probs_t for pack in packs]
        custom = self._hooks.advantages(batch, packs, log_probs=log_probs, ref_log_probs=ref_log_probs)
        if custom is not None:
            returns: Sequence[Tensor | None] = custom.returns or [None] * len(packs)
            return [_goal(*each) for each in zip(packs, custom.advantages, returns, strict=True)]
        return [
            _goal(pack, advantages_of(pack, self.config.algorithm, log_probs_t=own, ref_log_probs_t=ref))
            for pack, own, ref in zip(packs, log_probs, ref_log_probs, strict=True)
        ]

    def _resume_point(self) -> ResumePoint | None:
        """The critic of the checkpoint from which the actor goes on, in it or in the root of its own.

        Raises:
            UserError: --critic-load has another critic, or is missing.
        """
        checkpoint = self.config.checkpoint
        actor = resume_point(checkpoint.load, checkpoint.ckpt_step)
        if actor is None or actor.state is None:
            return None
        if (actor.directory / CRITIC).is_dir():
            return replace(actor, directory=actor.directory / CRITIC)
        elsewhere = actor.state.get(CRITIC)
        return None if elsewhere is None else self._resume_elsewhere(actor, elsewhere)

    def _resume_elsewhere(self, actor: ResumePoint, saved: dict[str, str]) -> ResumePoint:
        root = self.config.critic.critic_load
        if root is None or is_hf_folder(root):
            raise UserError(f"{actor.directory}: its critic was saved to {saved['root']}; give that as --critic-load")
        found = resume_point(root, actor.iteration)
        if found is None or found.state is None or found.state.get("id") != saved["id"]:
            raise UserError(f"--critic-load {root} does not have the critic of {actor.directory}")
        return found

    def _load_start(self, resume: ResumePoint | None) -> None:
        """Without a critic to go on with: the weights of ``--critic-load``, else those that the actor starts from."""
        checkpoint, given = self.config.checkpoint, self.config.critic.critic_load
        if resume is not None:
            return
        actor = resume_point(checkpoint.load, checkpoint.ckpt_step)
        if given is not None:
            self._load_weights(given, None)
        elif actor is not None:
            with older_may_do(actor.directory):
                load_weights(actor.directory, self.chunks, optional=(HEAD,))
        elif checkpoint.load is not None and is_hf_folder(checkpoint.load):
            self._load_weights(checkpoint.load, None)
        else:
            self._load_weights(checkpoint.ref_load or checkpoint.hf_checkpoint, checkpoint.ref_ckpt_step)

    def _load_weights(self, source: str, ckpt_step: int | None) -> None:
        """Of a critic, or of a policy, which has no head: then it starts at 0."""
        if is_hf_folder(source):
            load_hf_weights(self.chunks, self.shape, source, untouched=(HEAD,))
            return
        directory = some_checkpoint(source, ckpt_step).directory
        inside = directory / CRITIC  # of a checkpoint of actor and critic
        with older_may_do(directory, "--ref-ckpt-step"):
            load_weights(inside if inside.is_dir() else directory, self.chunks, optional=(HEAD,))


def _goal(pack: MicroBatch, advantages_t: Tensor, returns_t: Tensor | None = None) -> Goal:
    """Returns are the user's, or advantages and values together, before anything is whitened."""
    values_t = pack.scores.values_t
    assert values_t is not None, "the critic scores a rollout before it trains on it"
    drop_not_finite(advantages_t, pack)
    if returns_t is None:
        return Goal(old_values_t=values_t, returns_t=advantages_t + values_t)
    drop_not_finite(returns_t, pack, what="a return")
    return Goal(old_values_t=values_t, returns_t=returns_t.masked_fill(~pack.mask_t, 0.0))
