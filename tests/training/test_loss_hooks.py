"""Custom parts of a loss, in a real Megatron model: each does what the built-in one of the same formula does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.harness import batch_of, config_of, free_port, make_samples, make_step, on_ranks, started
from tests.training.test_step import gradients_by_hf_name, load_reference
from vime.config import Config
from vime.errors import UserError
from vime.plugins import Hook
from vime.training.loss_hooks import CustomMean
from vime.training.worker import TrainWorker

EXAMPLES = "examples.plugins.losses"
FLAGS = ["--fp32", "--lr", "0", "--clip-grad", "0"]
PACKS = [(3, 0, 5), (1, 2, 4, 6, 7)]


def learn(model: Path, *flags: str) -> tuple[dict[str, float], Tensor]:
    """The metrics of a step and its gradient."""
    samples = make_samples(masked=True)
    with started(config_of(model, *FLAGS, *flags)) as worker:
        (metrics,) = worker.train(batch_of(samples, make_step(samples, *PACKS))).steps
        return metrics, gradient(worker)


def gradient(worker: TrainWorker) -> Tensor:
    found = gradients_by_hf_name(worker)
    return torch.cat([found[name].flatten() for name in sorted(found)])


def test_a_custom_correction_takes_the_place_of_the_weights(model_of: Callable[..., Path]) -> None:
    built_in, expected = learn(model_of(), "--use-tis", "--tis-clip", "1.5")
    path = ["--custom-tis-function-path", f"{EXAMPLES}:clipped_weights"]
    metrics, found = learn(model_of(), "--use-tis", "--tis-clip", "1.5", *path)
    assert metrics["train/train_rollout_logprob_abs_diff_max"] < 5, "its mask takes nothing out here"
    torch.testing.assert_close(found, expected)
    assert metrics["train/custom_weight"] == pytest.approx(built_in["train/tis"])


def far_masked(args: Any, *, pg_loss: Tensor, loss_masks: list[Tensor], **others: Any) -> Any:
    """No token of the first sample, and a large loss there."""
    length = len(loss_masks[0])
    masks = [torch.zeros_like(loss_masks[0]), *loss_masks[1:]]
    return torch.cat((100 * pg_loss[:length], pg_loss[length:])), masks, {}


def test_what_a_custom_correction_masks_counts_in_the_denominator_and_nowhere_else(
    model_of: Callable[..., Path],
) -> None:
    path = ["--custom-tis-function-path", f"{__name__}:far_masked"]
    metrics, _ = learn(model_of(), "--use-tis", *path)
    plain, _ = learn(model_of())
    samples = make_samples(masked=True)
    lost = sum(samples[i].reward for i in (3, 1)) / 8  # -A of each, as the ratio is 1, over N
    assert metrics["train/pg_loss"] == pytest.approx(plain["train/pg_loss"] + lost, rel=1e-4)
    assert metrics["train/skipped_steps"] == 0


def test_a_custom_mean_can_be_that_of_dr_grpo(model_of: Callable[..., Path]) -> None:
    _, expected = learn(model_of(), "--use-dr-grpo", "--dr-grpo-divisor", "1000", "--entropy-coef", "0.1")
    path = ["--custom-pg-loss-reducer-function-path", f"{EXAMPLES}:constant_length"]
    _, found = learn(model_of(), *path, "--entropy-coef", "0.1")
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("per_token", [False, True])
def test_a_custom_loss_has_the_gradient_of_its_formula(model_of: Callable[..., Path], per_token: bool) -> None:
    model, samples = model_of(), make_samples(masked=True)
    path = ["--loss-type", "custom_loss", "--custom-loss-function-path", f"{EXAMPLES}:reinforce"]
    words = [*path, "--rollout-temperature", "0.7", *["--calculate-per-token-loss"] * per_token]
    metrics, found = learn(model, *words)
    actor = load_reference(model)
    losses, counts = [], []
    for sample in samples:
        mask = torch.tensor(sample.loss_mask).float()
        tokens = torch.tensor([sample.tokens])
        scores = actor(tokens).logits[0, -sample.response_length - 1 : -1] / 0.7
        chosen = scores.log_softmax(-1).gather(1, tokens[0, -sample.response_length :, None]).squeeze(1)
        losses.append((-sample.reward * chosen * mask).sum())
        counts.append(max(float(mask.sum()), 1.0))
    total = sum(losses) / sum(counts) if per_token else sum(x / n for x, n in zip(losses, counts, strict=True)) / 8
    assert isinstance(total, Tensor)
    total.backward()
    wanted = {name: parameter.grad for name, parameter in actor.named_parameters()}
    expected = torch.cat([wanted[name].flatten() for name in sorted(wanted)])
    assert metrics["train/loss"] == pytest.approx(total.item(), rel=1e-5)
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    assert metrics["train/chosen_log_prob"] < 0


def test_custom_advantages_are_whitened_like_any(model_of: Callable[..., Path]) -> None:
    samples = make_samples(masked=True)  # rewards 0 and 1 in each group: the other one is the baseline
    path = ["--custom-advantage-function-path", f"{EXAMPLES}:leave_one_out"]
    metrics, _ = learn(model_of(), *path)
    signs = [-1.0 if sample.index % 2 == 0 else 1.0 for sample in samples]
    assert metrics["rollout/advantages"] == pytest.approx(sum(signs) / 8, abs=1e-6)
    assert metrics["train/pg_loss"] == pytest.approx(-sum(signs) / 8, abs=1e-6)
    metrics, _ = learn(model_of(), *path, "--normalize-advantages", "--calculate-per-token-loss")
    assert metrics["rollout/advantages"] == pytest.approx(0.0, abs=1e-6)


def first_not_finite(args: Any, rollout_data: dict[str, Any]) -> None:
    rollout_data["advantages"] = [torch.ones(mask.shape) for mask in rollout_data["loss_masks"]]
    rollout_data["advantages"][0][0] = float("nan")


def test_a_sample_whose_custom_advantage_is_not_finite_is_counted_and_left_out(model_of: Callable[..., Path]) -> None:
    path = ["--custom-advantage-function-path", f"{__name__}:first_not_finite"]
    (metrics, found), (_, expected) = learn(model_of(), *path), learn(model_of(), *path, *POSTPROCESS)
    assert metrics["train/nonfinite_samples"] == 1 and metrics["rollout/advantages"] == pytest.approx(7 / 8)
    torch.testing.assert_close(found, expected)


def does_nothing(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    assert rollout_data["advantages"][0].eq(0).all() and not rollout_data["loss_masks"][0].any()


POSTPROCESS = ["--rollout-data-postprocess-path", f"{__name__}:does_nothing"]


def too_short(args: Any, rollout_data: dict[str, Any]) -> None:
    rollout_data["advantages"] = [torch.ones(0) for _ in rollout_data["loss_masks"]]


def sometimes(args: Any, *, pg_loss: Tensor, loss_masks: list[Tensor], **others: Any) -> Any:
    """A metric in the larger of the two micro-batches alone."""
    return pg_loss, None, {"rare": pg_loss, "always": pg_loss} if len(loss_masks) == 5 else {"always": pg_loss}


def by_rank(args: Any, batch: Any, logits: Tensor, sum_of_sample_mean: Any) -> Any:
    return logits.mean() * 0, {f"of_rank_{torch.distributed.get_rank()}": 1.0, "of_all": 1.0}


def exploding(args: Any, batch: Any, logits: Tensor, sum_of_sample_mean: Any) -> Any:
    return logits.mean() * (float("nan") if 3 in batch["sample_indices"] else 1.0), {}


def no_pair(args: Any, batch: Any, logits: Tensor, sum_of_sample_mean: Any) -> Any:
    return logits.sum()


def raises(total_lengths: Sequence[int], response_lengths: Any, loss_masks: Any, calculate_per_token_loss: bool) -> Any:
    return {}["missing"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--custom-advantage-function-path", f"{__name__}:too_short"], "advantages[0] to the shape [0], it must be"),
        (["--loss-type", "custom_loss", "--custom-loss-function-path", f"{__name__}:no_pair"], "(loss, metrics)"),
        (["--custom-pg-loss-reducer-function-path", f"{__name__}:raises"], "raised KeyError"),
        (
            ["--use-tis", "--custom-tis-function-path", f"{__name__}:sometimes"],
            "must return the same metrics for every micro-batch; only some have train/rare",
        ),
    ],
)
def test_what_goes_wrong_names_the_function(model_of: Callable[..., Path], flags: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        learn(model_of(), *flags)
    assert message in str(error.value)
    assert " ".join(flags[-2:]) in str(error.value)


def refusal(rank: int, world_size: int, config: Config, port: int) -> str:
    with started(config, rank=rank, world_size=world_size, port=port) as worker, pytest.raises(UserError) as error:
        worker.train(batch_of(make_samples()))
    return str(error.value)


def test_ranks_that_report_different_metrics_are_told_instead_of_waiting_for_each_other(
    model_of: Callable[..., Path],
) -> None:
    path = ["--loss-type", "custom_loss", "--custom-loss-function-path", f"{__name__}:by_rank"]
    config = config_of(model_of(), *FLAGS, "--actor-num-gpus-per-node", "2", *path)
    for message in on_ranks(2, refusal, config, free_port()):
        assert "only some have train/of_rank_0, train/of_rank_1" in message
        assert " ".join(path[-2:]) in message


def test_samples_must_be_alike_in_what_they_carry(model_of: Callable[..., Path]) -> None:
    samples = [dataclasses.replace(s, rollout_log_probs=None) if s.index == 2 else s for s in make_samples()]
    with started(config_of(model_of(), *FLAGS)) as worker, pytest.raises(UserError, match="all have rollout_log_probs"):
        worker.train(batch_of(samples, make_step(samples, *PACKS)))


def test_a_loss_that_is_not_finite_names_the_samples_of_its_micro_batch(
    model_of: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = ["--loss-type", "custom_loss", "--custom-loss-function-path", f"{__name__}:exploding"]
    metrics, _ = learn(model_of(), *path)
    assert metrics["train/skipped_steps"] == 1
    assert caplog.text.rstrip().endswith("not finite: the loss of sample 3, 0, 5")


def test_a_reducer_that_raises_where_it_is_used_is_named_as_where_it_is_made() -> None:
    def reducer(*arguments: Any) -> Callable[[Tensor], Tensor]:
        def reduced(values: Tensor) -> Tensor:
            raise SystemExit(3)

        return reduced

    # no more of a micro-batch and of a mean than is read here
    batch: Any = SimpleNamespace(
        total_lengths=(3,), response_lengths=(2,), mask_t=torch.ones(2, dtype=torch.bool), indices=(4,)
    )
    mean: Any = SimpleNamespace(denominator=1.0)
    custom = CustomMean(Hook(reducer, "--custom-pg-loss-reducer-function-path", "my:f"), per_token=False)
    with pytest.raises(UserError, match=r"my:f: raised SystemExit: 3 \(test_loss_hooks.py:\d+\), for sample 4"):
        custom(batch, mean)(torch.ones(2))
