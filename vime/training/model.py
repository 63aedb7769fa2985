"""Megatron's GPT model whose last stage answers with log-probabilities instead of logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from vime.training.layers.context import assemble
from vime.training.logprobs import TokenLogProbs, Vocabulary, token_log_probs
from vime.training.packing import MicroBatch

__all__ = ["PolicyModel", "Question", "answer_of", "pick", "run"]


@dataclass(frozen=True, slots=True)
class Question:
    """What the last stage is asked: the log-probabilities of the response tokens."""

    batch: MicroBatch
    temperature: float
    entropy_gradient: bool  # whether the entropy is part of the loss; it costs a pass over the logits


class PolicyModel(GPTModel):  # type: ignore[misc]
    """A causal language model. Its last pipeline stage returns log-probability and entropy, stacked: float32 [2, T].

    Under context parallelism each rank computes those of the tokens that it predicts, and every rank returns all.

    The output layer is a module that is called in the model's forward pass (and not in the loss), so that Megatron's
    hooks which gather its weight and reduce its gradient see it used. Only what it computes is ours.
    """

    tokens_in_vocabulary: int  # without the rows that only pad

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:
            self.output_layer.forward = self._answer

    def _postprocess(self, hidden_states: Tensor, labels: Question, **_: Any) -> Tensor:
        """Megatron hands the output of the decoder [L, 1, H] to this method, and ``labels`` as they were given."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True)
        else:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states)
        answer: Tensor = self.output_layer(pick(hidden_states.squeeze(1), labels.batch.predictors_p), labels)
        return answer

    def _answer(self, hidden_ph: Tensor, question: Question) -> Tensor:
        batch, own = question.batch, question.batch.predicted_p
        targets_p = batch.targets_t if own is None else batch.targets_t[own]
        weight = self.output_weight()
        log_probs, entropy = token_log_probs(
            hidden_ph, weight, targets_p, self._vocabulary(len(weight)), temperature=question.temperature
        )
        answer = torch.stack((log_probs, entropy if question.entropy_gradient else entropy.detach()))
        if own is None:
            return answer
        return assemble(answer, own, len(batch.targets_t), parallel_state.get_context_parallel_group())

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


def run(chunk: Any, batch: MicroBatch, temperature: float, *, entropy_gradient: bool = False) -> Tensor:
    """The forward pass of one (wrapped) model chunk; on the last stage split the answer by ``answer_of``."""
    question = Question(batch, temperature, entropy_gradient)
    output: Tensor = chunk(
        batch.tokens_l[None], batch.positions_l[None], None, labels=question, packed_seq_params=batch.segments
    )
    return output


def answer_of(output: Tensor) -> TokenLogProbs:
    """What the last stage returned, by name."""
    return TokenLogProbs(*output.unbind(0))
