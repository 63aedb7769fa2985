"""Megatron's GPT model whose last stage answers with log-probabilities instead of logits.

Where a draft layer is trained (``layers/mtp.py``), it is part of the model and answers as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from torch import Tensor

from vime.training.layers.context import assemble
from vime.training.layers.mtp import DraftBlock, embedded
from vime.training.logprobs import TokenLogProbs, Vocabulary, token_log_probs
from vime.training.packing import MicroBatch

__all__ = ["PolicyModel", "Question", "answer_of", "draft_of", "pick", "run"]


@dataclass(frozen=True, slots=True)
class Question:
    """What the last stage is asked: the log-probabilities of the response tokens, or what they are made from."""

    batch: MicroBatch
    temperature: float
    entropy_gradient: bool  # whether the entropy is part of the loss; it costs a pass over the logits
    logits: bool = False  # to be answered with the logits of the whole vocabulary, before the temperature


class PolicyModel(GPTModel):  # type: ignore[misc]
    """A causal language model. Its last pipeline stage returns log-probability and entropy, stacked: float32 [2, T].
    A third row has the log-probability that the draft layer gives, if there is one and gradients are wanted.

    Asked for logits it returns those, [T, V] of the model's dtype, which take a thousand times the memory.

    Under context parallelism each rank computes those of the tokens that it predicts, and every rank returns all.

    The output layer is a module that is called in the model's forward pass (and not in the loss), so that Megatron's
    hooks which gather its weight and reduce its gradient see it used. Only what it computes is ours.
    """

    tokens_in_vocabulary: int  # without the rows that only pad
    lent_embedding: Tensor | None = None  # of the first pipeline stage, as long as the draft layer needs it

    def __init__(self, *args: Any, draft: DraftBlock | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:
            self.output_layer.forward = self._answer
        self._drafts = draft is not None
        if draft is not None:
            self.mtp = draft  # where there is one: Megatron's schedules ask whether the attribute exists

    def _postprocess(self, hidden_states: Tensor, labels: Question, **_: Any) -> Tensor:
        """Megatron hands the output of the decoder [L, 1, H] to this method, and ``labels`` as they were given."""
        if not self.post_process:
            return hidden_states
        whole = self._whole(hidden_states)
        answer: Tensor = self.output_layer(pick(whole, labels.batch.predictors_p), labels)
        if not self._drafts or not torch.is_grad_enabled():
            return answer
        return torch.cat((answer, self._draft(hidden_states.detach(), labels)))

    def _whole(self, hidden_x1h: Tensor) -> Tensor:
        """All tokens of this rank, [L, H], for the output layer; backward adds up what tensor-parallel ranks make."""
        if self.config.sequence_parallel:
            gathered = gather_from_sequence_parallel_region(hidden_x1h, tensor_parallel_output_grad=True)
        else:
            gathered = copy_to_tensor_model_parallel_region(hidden_x1h)
        whole: Tensor = gathered.squeeze(1)
        return whole

    def _draft(self, hidden_x1h: Tensor, question: Question) -> Tensor:
        """What the draft layer gives the response tokens, [1, T]; 0 for those that it cannot predict."""
        batch, ahead = question.batch, question.batch.ahead
        assert ahead is not None, "the packer knows of the draft layer"
        rows = self._embedding_rows()
        following = embedded(ahead.following_l, rows, sequence_parallel=self.config.sequence_parallel)
        hidden = pick(self._whole(self.mtp(hidden_x1h, following, batch.segments)), ahead.predictors_p)
        weight = self.output_weight().detach()
        log_probs, _ = token_log_probs(
            hidden,
            weight,
            batch.targets_t[ahead.predicted_p],
            self._vocabulary(len(weight)),
            temperature=question.temperature,
        )
        part = batch.segments.part
        return assemble(log_probs[None], ahead.predicted_p, len(batch.targets_t), None if part is None else part.group)

    def _embedding_rows(self) -> Tensor:
        """The rows of the embedding on this rank, [V, H], to be read only."""
        if self.share_embeddings_and_output_weights:
            return self.output_weight().detach()
        if self.pre_process:
            rows: Tensor = self.embedding.word_embeddings.weight
            return rows.detach()
        assert self.lent_embedding is not None, "the first stage lends its embedding before a training step"
        return self.lent_embedding

    def _answer(self, hidden_ph: Tensor, question: Question) -> Tensor:
        if question.logits:
            return self._logits(hidden_ph, question.batch)
        batch, own = question.batch, question.batch.predicted_p
        targets_p = batch.targets_t if own is None else batch.targets_t[own]
        weight = self.output_weight()
        log_probs, entropy = token_log_probs(
            hidden_ph,
            weight,
            targets_p,
            self._vocabulary(len(weight)),
            temperature=question.temperature,
            adds=self.config.gradient_accumulation_fusion,
        )
        answer = torch.stack((log_probs, entropy if question.entropy_gradient else entropy.detach()))
        if own is None:
            return answer
        return assemble(answer, own, len(batch.targets_t), parallel_state.get_context_parallel_group())

    def _logits(self, hidden_ph: Tensor, batch: MicroBatch) -> Tensor:
        """Every rank has the whole vocabulary and computes the same loss; each propagates its part."""
        whole: Tensor = gather_from_tensor_model_parallel_region(hidden_ph @ self.output_weight().t())
        logits_pv = whole[:, : self.tokens_in_vocabulary]
        if batch.predicted_p is None:
            return logits_pv
        group = parallel_state.get_context_parallel_group()
        return assemble(logits_pv.t(), batch.predicted_p, len(batch.targets_t), group).t()

    def output_weight(self) -> Tensor:
        """The rows of the output layer on this rank, [V, H]; those of the embedding when the two are tied."""
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight

    def _vocabulary(self, rows: int) -> Vocabulary:
        group = parallel_state.get_tensor_model_parallel_group()
        return Vocabulary.shard(self.tokens_in_vocabulary, rows, group.rank(), group if group.size() > 1 else None)


class _Pick(torch.autograd.Function):
    """Rows by index, perhaps more than once: gradients of the same row are added in float32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        total = gradient.new_zeros(ctx.rows, gradient.shape[1], dtype=torch.float32)
        return total.index_add_(0, index, gradient.float()).to(gradient.dtype), None


def pick(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[index]``, whose gradients are added in float32."""
    picked: Tensor = _Pick.apply(rows, index)  # type: ignore[no-untyped-call]
    return picked


def run(
    chunk: Any, batch: MicroBatch, temperature: float, *, entropy_gradient: bool = False, logits: bool = False
) -> Tensor:
    """The forward pass of one (wrapped) model chunk; on the last stage split the answer by ``answer_of``."""
    question = Question(batch, temperature, entropy_gradient, logits)
    output: Tensor = chunk(
        batch.tokens_l[None], batch.positions_l[None], None, labels=question, packed_seq_params=batch.segments
    )
    return output


def answer_of(output: Tensor) -> TokenLogProbs:
    """What the last stage returned of the policy, by name."""
    return TokenLogProbs(output[0], output[1])


def draft_of(output: Tensor) -> Tensor:
    """The log-probabilities that the draft layer gave the response tokens, float32 [T] with gradient."""
    return output[2]
