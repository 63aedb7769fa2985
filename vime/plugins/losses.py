"""Contracts of the functions that take part in advantages and losses. Torch is imported where it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vime.plugins.contract import Contract, WrongAnswer, read_nothing, shown
from vime.plugins.tensors import token_rows
from vime.plugins.trial import Trial

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CONTRACTS",
    "CUSTOM_ADVANTAGE",
    "CUSTOM_LOSS",
    "CUSTOM_PG_LOSS_REDUCER",
    "CUSTOM_TIS",
    "read_correction",
    "read_loss",
    "read_mean",
]


ESTIMATES = ("advantages", "returns")
"""What of ``rollout_data`` a run reads after --custom-advantage-function-path; the second only if it is there."""


def read_correction(answer: Any, lengths: Sequence[int]) -> tuple[Tensor, list[Tensor] | None, dict[str, Tensor]]:
    """What --custom-tis-function-path returned: the loss [T], masks or None, and metrics of tokens [T].

    Raises:
        WrongAnswer: it is something else.
    """
    if not isinstance(answer, tuple) or len(answer) != 3 or not isinstance(answer[2], Mapping):
        raise WrongAnswer(f"must return (pg_loss, masks, metrics), not {shown(answer)}")
    loss, masks, metrics = answer
    if masks is not None:
        masks = token_rows({"loss_masks": masks}, "loss_masks", lengths)
    named = {_metric_name(name): _tokens(values, f"metrics[{name!r}]", lengths) for name, values in metrics.items()}
    return _tokens(loss, "pg_loss", lengths), masks, named


def read_mean(answer: Any) -> Callable[[Tensor], Any]:
    """What --custom-pg-loss-reducer-function-path returned."""
    if not callable(answer):
        raise WrongAnswer(f"must return a function of a tensor, not {shown(answer)}")
    made: Callable[[Tensor], Any] = answer
    return made


def read_loss(answer: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """What --custom-loss-function-path returned: the loss and metrics, scalars.

    Raises:
        WrongAnswer: it is something else.
    """
    import torch

    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], Mapping):
        raise WrongAnswer(f"must return (loss, metrics), not {shown(answer)}")
    loss, metrics = answer
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise WrongAnswer(f"must return a loss of one number, not {_kind(loss)}")
    if not loss.requires_grad:
        raise WrongAnswer("must return a loss with a gradient: one that depends on logits")
    named = {_metric_name(name): torch.as_tensor(value, device=loss.device) for name, value in metrics.items()}
    for name, value in named.items():
        if value.numel() != 1:
            raise WrongAnswer(f"must return metrics of one number each, not {name} of {_kind(value)}")
    return loss, named


def _tokens(values: Any, name: str, lengths: Sequence[int]) -> Tensor:
    """A tensor of tokens [T], or the list of those of the samples."""
    import torch

    if isinstance(values, list | tuple):
        values = torch.cat([torch.as_tensor(each) for each in values])
    if not isinstance(values, torch.Tensor) or values.shape != (sum(lengths),):
        raise WrongAnswer(f"must return {name} with the {sum(lengths)} response tokens, not {_kind(values)}")
    return values


def _metric_name(name: str) -> str:
    return name if "/" in name else f"train/{name}"


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return shown(value) if shape is None else f"a tensor of the shape {list(shape)}"


def _try_advantage(trial: Trial) -> None:
    from vime.plugins import synthetic_training

    data = synthetic_training.rollout_data()
    del data["advantages"]
    kept = dict(data)
    with trial.case("a rollout", lambda: {f"rollout_data[{name!r}]": value for name, value in kept.items()}):
        read_nothing(trial.call(trial.args.extended(role="actor"), data))
        for name in ESTIMATES:
            if name == "advantages" or name in data:
                token_rows(data, name, data["response_lengths"])


def _try_tis(trial: Trial) -> None:
    import torch

    from vime.plugins import synthetic_training

    data = synthetic_training.rollout_data()
    lengths = data["response_lengths"]
    loss = torch.linspace(-1, 1, sum(lengths), requires_grad=True)
    with trial.case("a micro-batch"):
        answer = trial.call(
            trial.args.extended(role="actor"),
            pg_loss=loss,
            train_log_probs=data["log_probs"],
            rollout_log_probs=data["rollout_log_probs"],
            loss_masks=data["loss_masks"],
            total_lengths=data["total_lengths"],
            response_lengths=lengths,
        )
        corrected, _, _ = read_correction(answer, lengths)
        if not corrected.requires_grad:
            raise WrongAnswer("must return a pg_loss that keeps the gradient of the one it got")


def _try_reducer(trial: Trial) -> None:
    import torch

    from vime.plugins import synthetic_training

    data = synthetic_training.rollout_data()
    for per_token in (False, True):
        values = torch.ones(sum(data["response_lengths"]), requires_grad=True)
        with trial.case(f"calculate_per_token_loss {per_token}"):
            answer = trial.call(data["total_lengths"], data["response_lengths"], data["loss_masks"], per_token)
            total = read_mean(answer)(values)
            if not isinstance(total, torch.Tensor) or total.numel() != 1 or not total.requires_grad:
                raise WrongAnswer("must return a function that makes one number of a tensor, and keeps its gradient")


def _try_loss(trial: Trial) -> None:
    import torch

    from vime.plugins import synthetic_training

    data = synthetic_training.rollout_data()
    lengths, masks = data["response_lengths"], data["loss_masks"]
    responses = [tokens[-length:] for tokens, length in zip(data["tokens"], lengths, strict=True)]
    names = "sample_indices total_lengths response_lengths rewards loss_masks advantages log_probs ref_log_probs"
    batch = {name: data[name] for name in [*names.split(), "rollout_log_probs"]} | {"response_tokens": responses}
    logits = torch.linspace(-1, 1, sum(lengths) * synthetic_training.VOCABULARY).reshape(sum(lengths), -1)

    def sum_of_sample_mean(values: Tensor) -> Tensor:
        rows = zip(torch.split(values, lengths), masks, strict=True)
        return torch.stack([(row * mask).sum() / mask.sum().clamp(min=1) for row, mask in rows]).sum()

    with trial.case("a micro-batch"):
        args = trial.args.extended(role="actor")
        read_loss(trial.call(args, batch, logits.requires_grad_(), sum_of_sample_mean))


CUSTOM_ADVANTAGE = Contract(
    flag="--custom-advantage-function-path",
    side="training",
    purpose="Computes the advantages of a rollout, in place of --advantage-estimator.",
    when="Once a rollout on every rank of the actor's last pipeline stage, after the log-probs, with the samples of "
    "the rank. --normalize-advantages whitens what it leaves. Ranks that share samples (tensor and context parallel) "
    "must come to the same result. With PPO also on the critic's, whose ranks have the same samples; "
    'rollout_data["values"] are there then.',
    arguments=("args", "rollout_data"),
    returns='Nothing; it sets rollout_data["advantages"] to a list of tensors, one a sample with a value for each of '
    'its response tokens, and with PPO perhaps rollout_data["returns"] likewise: what the critic learns, else '
    "advantages and values together. A sample with a value that is not finite is named and left out of training.",
    trial=_try_advantage,
    example="examples.plugins.losses:leave_one_out",
)

CUSTOM_TIS = Contract(
    flag="--custom-tis-function-path",
    side="training",
    purpose="Corrects the policy loss for what the engine sampled otherwise than the trainer would have, in place of "
    "the weights of --use-tis.",
    when="In each micro-batch of a training pass, on the ranks of the actor's last pipeline stage.",
    arguments=("args",),
    keywords=(
        "pg_loss",
        "train_log_probs",
        "rollout_log_probs",
        "loss_masks",
        "total_lengths",
        "response_lengths",
    ),
    returns="(pg_loss, masks, metrics): the loss of each token like the pg_loss it got (all samples one after the "
    "other); masks like loss_masks, or None, whose zeros take tokens out of the sum and not out of what it is divided "
    "by; and by name tensors like pg_loss, whose means are reported.",
    trial=_try_tis,
    example="examples.plugins.losses:clipped_weights",
)

CUSTOM_PG_LOSS_REDUCER = Contract(
    flag="--custom-pg-loss-reducer-function-path",
    side="training",
    purpose="Decides how the policy loss of tokens becomes one number. Entropy, KL and metrics keep their means.",
    when="In each micro-batch of a training pass, on the ranks of the actor's last pipeline stage.",
    arguments=("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"),
    returns="A function of a tensor (the loss of all response tokens, one sample after the other), which makes their "
    "sum over samples: it is divided by the number of samples of the whole step, or with --calculate-per-token-loss "
    "by its trained tokens.",
    trial=_try_reducer,
    example="examples.plugins.losses:constant_length",
)

CUSTOM_LOSS = Contract(
    flag="--custom-loss-function-path",
    side="training",
    purpose="Replaces the whole loss; with --loss-type custom_loss.",
    when="In each micro-batch of a training pass, on the ranks of the actor's last pipeline stage. batch has lists "
    "with an entry for each sample: response_tokens, loss_masks, advantages, log_probs (before the update), "
    "ref_log_probs and rollout_log_probs where they are known, rewards, total_lengths, response_lengths, "
    "sample_indices. logits, [tokens, vocabulary], are what the response tokens of all samples were predicted from, "
    "one sample after the other, not yet divided by the temperature.",
    arguments=("args", "batch", "logits", "sum_of_sample_mean"),
    returns="(loss, metrics): the sum over samples, as sum_of_sample_mean makes it of a tensor of tokens, and such "
    "sums by name. They are divided by the number of samples of the whole step, or with --calculate-per-token-loss, "
    "where sum_of_sample_mean sums over tokens, by its trained tokens.",
    trial=_try_loss,
    example="examples.plugins.losses:reinforce",
)

CONTRACTS = (CUSTOM_ADVANTAGE, CUSTOM_TIS, CUSTOM_PG_LOSS_REDUCER, CUSTOM_LOSS)
