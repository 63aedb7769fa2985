"""Megatron's GPT model whose last stage answers with values: what a critic expects the rest of an answer to earn."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from vime.training.layers.context import assemble
from vime.training.model import pick
from vime.training.packing import MicroBatch

__all__ = ["HEAD", "ValueHead", "ValueModel", "values_of_chunk"]

HEAD = "value_head.weight"
"""The parameter that a critic has and a policy has not."""


class ValueHead(torch.nn.Module):
    """One column in place of the vocabulary: float32 products with a weight [1, H] in the model's dtype.

    It starts at 0, so that the first advantages are the rewards themselves and not the noise of a random column.
    Tensor-parallel ranks hold copies, which stay equal because they compute the same.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))

    def forward(self, hidden_ph: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden_ph.float(), self.weight.float()).squeeze(1)


class ValueModel(GPTModel):  # type: ignore[misc]
    """A causal language model with a value head. Its last pipeline stage returns a value a response token: float32 [T].

    The value of a token is that of the state before it, computed where a policy would predict the token. Under context
    parallelism each rank computes those of the tokens that it would predict, and every rank returns all.
    """

    tokens_in_vocabulary: int  # without the rows that only pad

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"share_embeddings_and_output_weights": False})
        if self.post_process:
            del self.output_layer
            self.value_head = ValueHead(self.config.hidden_size, self.config.params_dtype)

    def _postprocess(self, hidden_states: Tensor, labels: MicroBatch, **_: Any) -> Tensor:
        """Megatron hands the output of the decoder [L, 1, H] to this method, and ``labels`` as they were given."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:  # what follows is the same on all ranks, so each has the whole gradient
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        values: Tensor = self.value_head(pick(hidden_states.squeeze(1), labels.predictors_p))
        if labels.predicted_p is None:
            return values
        group = parallel_state.get_context_parallel_group()
        return assemble(values[None], labels.predicted_p, len(labels.targets_t), group).squeeze(0)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """That of any Megatron module: what its language models add is about output layers, which this one has not."""
        state: dict[str, Any] = super(LanguageModule, self).sharded_state_dict(*args, **kwargs)
        return state


def values_of_chunk(chunk: Any, batch: MicroBatch) -> Tensor:
    """The forward pass of one (wrapped) model chunk; on the last stage the values of the response tokens."""
    output: Tensor = chunk(
        batch.tokens_l[None], batch.positions_l[None], None, labels=batch, packed_seq_params=batch.segments
    )
    return output
