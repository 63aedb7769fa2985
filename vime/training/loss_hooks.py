"""The custom functions that take part in a loss: their arguments from packed tensors, their answers back into them.

Functions see lists with one entry a sample. What is [T] below counts the response tokens of all samples of the
micro-batch, one sample after the other; under context parallelism every rank has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vime.algorithms import reduce
from vime.config import Args
from vime.plugins import Hook, WrongAnswer
from vime.plugins.calling import Raised, guarded
from vime.plugins.losses import read_correction, read_loss, read_mean
from vime.training.loss import Given, Partial, of_trained_tokens
from vime.training.model import run
from vime.training.packing import MicroBatch

__all__ = ["CustomCorrection", "CustomMean", "CustomObjective"]


@dataclass(frozen=True, slots=True)
class CustomCorrection:
    """--custom-tis-function-path, in place of the importance weights."""

    hook: Hook
    args: Args

    def __call__(self, loss_t: Tensor, trainer_t: Tensor, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The corrected loss [T], 0 where the function masks a token, and metrics of tokens [T].

        Denominators stay those of the masks that came with the samples.
        """
        assert batch.rollout_log_probs_t is not None
        corrected_t, masks, metrics = self.hook.call(
            self.args,
            pg_loss=loss_t,
            train_log_probs=_rows(trainer_t, batch),
            rollout_log_probs=_rows(batch.rollout_log_probs_t, batch),
            loss_masks=_rows(batch.mask_t.long(), batch),
            total_lengths=list(batch.total_lengths),
            response_lengths=_lengths(batch),
            about=_about(batch),
            read=lambda answer: read_correction(answer, _lengths(batch)),
        )
        if masks is not None:
            corrected_t = corrected_t.masked_fill(~torch.cat(list(masks)).bool(), 0.0)
        return corrected_t, metrics


@dataclass(frozen=True, slots=True)
class CustomMean:
    """--custom-pg-loss-reducer-function-path: how the policy loss of tokens becomes one number."""

    hook: Hook
    per_token: bool

    def __call__(self, batch: MicroBatch, mean: reduce.Reduction) -> Callable[[Tensor], Tensor]:
        """The function makes the sum over samples; what is divided by is the number of samples of the whole step, or
        with --calculate-per-token-loss its tokens."""
        about = _about(batch)
        made = self.hook.call(
            list(batch.total_lengths),
            _lengths(batch),
            _rows(batch.mask_t.long(), batch),
            self.per_token,
            about=about,
            read=read_mean,
        )

        def reduced(values_t: Tensor) -> Tensor:
            try:
                with guarded():
                    total = made(values_t)
            except Raised as failed:
                raise self.hook.failure(failed.error, about) from failed.error
            if not isinstance(total, Tensor) or total.numel() != 1:
                raise self.hook.failure(WrongAnswer("must return a function that makes one number of a tensor"), about)
            return total.reshape(()).float() / mean.denominator

        return reduced


@dataclass(frozen=True, slots=True)
class CustomObjective:
    """--loss-type custom_loss. Implements ``step.Objective``."""

    hook: Hook
    args: Args
    per_token: bool

    def forward(self, chunk: Any, batch: MicroBatch) -> Tensor:
        return run(chunk, batch, 1.0, logits=True)

    def loss(self, output: Tensor, batch: MicroBatch, given: Given, mean: reduce.Reduction) -> tuple[Tensor, Partial]:
        """No loss of a single sample is known: where the whole is not finite, all of the micro-batch are suspects."""

        def sum_of_sample_mean(values_t: Tensor) -> Tensor:
            return mean(values_t) * mean.denominator

        batch, given = of_trained_tokens(batch, batch.mask_t), of_trained_tokens(given, batch.mask_t)
        total, metrics = self.hook.call(
            self.args, _seen(batch, given), output, sum_of_sample_mean, about=_about(batch), read=read_loss
        )
        loss = total.reshape(()).float() / mean.denominator
        sums = {name: value.detach().reshape(()).float() / mean.denominator for name, value in metrics.items()}
        suspects_n = (~loss.detach().isfinite()).expand(len(batch.indices))
        return loss, Partial({**sums, "train/loss": loss.detach()}, {}, suspects_n, self.hook)


def _seen(batch: MicroBatch, given: Given) -> dict[str, Any]:
    """What a custom loss gets of a micro-batch; without what nobody computed."""
    per_token = {
        "response_tokens": batch.targets_t,
        "loss_masks": batch.mask_t.long(),
        "advantages": given.advantages_t,
        "log_probs": given.old_log_probs_t,
        "ref_log_probs": given.ref_log_probs_t,
        "rollout_log_probs": batch.rollout_log_probs_t,
    }
    return {
        "sample_indices": list(batch.indices),
        "total_lengths": list(batch.total_lengths),
        "response_lengths": _lengths(batch),
        "rewards": batch.rewards_n.tolist(),
        **{name: _rows(values_t, batch) for name, values_t in per_token.items() if values_t is not None},
    }


def _rows(values_t: Tensor, batch: MicroBatch) -> list[Tensor]:
    """[T] → one tensor a sample."""
    return list(torch.split(values_t, _lengths(batch)))


def _lengths(batch: MicroBatch) -> list[int]:
    return list(batch.response_lengths)


def _about(batch: MicroBatch) -> str:
    return f"sample {', '.join(map(str, batch.indices))}"
