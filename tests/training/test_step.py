"""One optimizer step against the same step written out in plain PyTorch on the transformers model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import make_model
from tests.training.harness import batch_of, config_of, make_samples, make_step, started
from vime.data.batching import make_train_batches
from vime.models import weight_map
from vime.training.loss import Given
from vime.training.weights_io import global_parameters
from vime.training.worker import TrainWorker
from vime.types import RolloutBatch, TrainSample

GRADIENT_TOLERANCE = 1e-5  # of the norm of the difference to that of the gradient, fp32


def gradients_by_hf_name(worker: TrainWorker) -> dict[str, torch.Tensor]:
    """What Megatron accumulated, taken apart as the weights are."""
    parameters = global_parameters(worker.chunks)
    found: dict[str, torch.Tensor] = {}
    for rule in weight_map(worker.shape):
        if rule.megatron not in parameters:  # a critic has no output layer
            continue
        parts = rule.op.split(parameters[rule.megatron].main_grad)
        found |= {tensor.name: part.clone() for tensor, part in zip(rule.hf, parts, strict=True)}
    return found


def load_reference(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def forward(model: Any, sample: TrainSample) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the response tokens and entropies of their distributions."""
    tokens = torch.tensor([sample.tokens])
    log_probs = torch.log_softmax(model(tokens).logits[0, -sample.response_length - 1 : -1], -1)
    chosen = log_probs.gather(-1, tokens[0, -sample.response_length :, None]).squeeze(-1)
    return chosen, -(log_probs.exp() * log_probs).sum(-1)


def written_out(
    model: Any, samples: Sequence[TrainSample], old: Sequence[torch.Tensor], ref: Any, *, per_token: bool
) -> torch.Tensor:
    """The GRPO loss with clip 0.2/0.3, dual clip 1.5, 0.1 × KL (k3) and 0.01 × entropy, sample by sample."""
    total = torch.zeros(())
    for sample, old_log_probs in zip(samples, old, strict=True):
        new, entropy = forward(model, sample)
        with torch.no_grad():
            ref_log_probs, _ = forward(ref, sample)
        ratio, advantage = (new - old_log_probs).exp(), sample.reward
        loss = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.3) * advantage)
        if advantage < 0:
            loss = torch.minimum(loss, torch.tensor(-1.5 * advantage))
        difference = new - ref_log_probs
        loss = loss + 0.1 * ((-difference).exp() - 1 + difference) - 0.01 * entropy
        mask = torch.tensor(sample.loss_mask, dtype=torch.float32)
        total = total + (loss * mask).sum() / (1 if per_token else max(mask.sum(), 1) * len(samples))
    return total / sum(max(sample.trained_tokens, 1) for sample in samples) if per_token else total


FLAGS = ["--fp32", "--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3", "--entropy-coef", "0.01"]
FLAGS += ["--eps-clip", "0.2", "--eps-clip-high", "0.3", "--eps-clip-c", "1.5", "--clip-grad", "0"]


@pytest.mark.parametrize("per_token", [False, True], ids=["per sample", "per token"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_loss_and_gradient_are_those_of_the_formula(
    model_of: Callable[..., Path], tmp_path: Path, per_token: bool, tied: bool
) -> None:
    model, other = model_of(tied=tied), make_model(tmp_path / "other", "llama", tied=tied, seed=1)
    samples = make_samples(masked=True)
    generator = torch.Generator().manual_seed(0)
    actor, ref = load_reference(model), load_reference(other)
    with torch.no_grad():  # an old policy that is far enough for every clip to act somewhere
        old = [forward(actor, s)[0] + 0.5 * torch.randn(s.response_length, generator=generator) for s in samples]
    loss = written_out(actor, samples, old, ref, per_token=per_token)
    loss.backward()
    flags = [*FLAGS, "--ref-load", str(other), "--load", str(model)]
    with started(config_of(model, *flags, *["--calculate-per-token-loss"] * per_token)) as worker:
        order = [(3, 0, 5), (1, 2, 4, 6, 7)]
        packs = [worker._packer.pack([samples[i] for i in chosen]) for chosen in order]
        given = worker._given(batch_of(samples, make_step(samples, *order)), packs, _NoClock())
        for each, chosen in zip(given, order, strict=True):
            each.old_log_probs_t = torch.cat([old[i] for i in chosen])
        metrics = worker._learner.step(list(zip(packs, given, strict=True)), make_step(samples, *order))
        found = gradients_by_hf_name(worker)
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert 0 < metrics["train/pg_clipfrac"] < 1
    wanted = {name: parameter.grad for name, parameter in actor.named_parameters()}
    assert wanted.keys() == found.keys()
    difference = sum((found[name] - gradient).square().sum() for name, gradient in wanted.items()).sqrt()
    norm = sum(gradient.square().sum() for gradient in wanted.values()).sqrt()
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert difference / norm < GRADIENT_TOLERANCE


class _NoClock:
    def phase(self, name: str) -> Any:
        import contextlib

        return contextlib.nullcontext()


@pytest.mark.parametrize("precision", ["--bf16", "--fp32"])
def test_on_the_first_step_the_ratio_is_exactly_one_and_the_kl_exactly_zero(
    model_of: Callable[..., Path], precision: str
) -> None:
    model = model_of()
    flags = [precision, "--use-kl-loss", "--kl-loss-type", "low_var_kl", "--ref-load", str(model), "--lr", "1e-3"]
    samples = make_samples()
    for steps in ("1", "2"):  # the old log-probs are the current ones, or come from a pass of their own
        config = config_of(model, *flags, "--num-steps-per-rollout", steps)
        with started(config) as worker:
            halves = [make_step(samples[:4], (0, 1), (2, 3)), make_step(samples[4:], (4, 5), (6, 7))]
            used = halves if steps == "2" else [make_step(samples, (0, 1), (2, 3), (4, 5), (6, 7))]
            first, *later = worker.train(batch_of(samples, *used)).steps
        assert first["train/ppo_kl"] == 0.0
        assert first["train/pg_clipfrac"] == 0.0
        assert first["train/kl_loss"] == 0.0
        assert all(metrics["train/ppo_kl"] != 0.0 and metrics["train/kl_loss"] > 0.0 for metrics in later)


def test_how_samples_are_packed_does_not_change_the_step(model_of: Callable[..., Path]) -> None:
    samples = make_samples(masked=True)
    found = []
    for micro_batches in ([tuple(range(8))], [(i,) for i in range(8)], [(7, 2), (0, 1, 3), (6, 5, 4)]):
        with started(config_of(model_of(), "--fp32", "--lr", "1e-3")) as worker:
            (metrics,) = worker.train(batch_of(samples, make_step(samples, *micro_batches))).steps
            found.append({name: value for name, value in metrics.items() if not name.startswith("perf/")})
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-5, abs=1e-6)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(model_of: Callable[..., Path]) -> None:
    samples = make_samples()
    with started(config_of(model_of(), "--lr", "1e-2", "--lr-decay-style", "linear")) as worker:
        pack = worker._packer.pack(samples)
        before = [p.detach().clone() for chunk in worker.chunks for p in chunk.parameters()]
        poisoned = Given(advantages_t=torch.full_like(pack.mask_t, float("nan"), dtype=torch.float32))
        metrics = worker._learner.step([(pack, poisoned)], make_step(samples))
        after = [p.detach().clone() for chunk in worker.chunks for p in chunk.parameters()]
        assert metrics["train/skipped_steps"] == 1.0
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
        (healthy,) = worker.train(batch_of(samples)).steps
    assert healthy["train/skipped_steps"] == 0.0
    assert healthy["train/lr"] == metrics["train/lr"]


def test_engine_log_probs_are_compared_with_those_of_the_trainer(model_of: Callable[..., Path]) -> None:
    samples = make_samples(masked=True)
    with started(config_of(model_of(), "--fp32")) as worker:
        (log_probs,) = worker._log_probs([worker._packer.pack(samples)])
        (metrics,) = worker.train(batch_of(samples)).steps
    masks = torch.tensor([bit for sample in samples for bit in sample.loss_mask]).bool()
    rollout = torch.tensor([x for sample in samples for x in sample.rollout_log_probs or ()])
    difference = (log_probs - rollout).abs()
    means = [
        part[mask].mean()
        for part, mask in zip(
            difference.split([s.response_length for s in samples]),
            masks.split([s.response_length for s in samples]),
            strict=True,
        )
    ]
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(float(torch.stack(means).mean()), rel=1e-5)
    assert metrics["train/train_rollout_logprob_abs_diff_max"] == pytest.approx(
        float(difference[masks].max()), rel=1e-5
    )


def test_advantages_are_whitened_over_all_micro_batches_of_the_rollout(model_of: Callable[..., Path]) -> None:
    samples = make_samples()
    with started(config_of(model_of(), "--fp32", "--normalize-advantages", "--calculate-per-token-loss")) as worker:
        (metrics,) = worker.train(batch_of(samples, make_step(samples, (0, 1, 2), (3, 4, 5, 6, 7)))).steps
    assert metrics["rollout/advantages"] == pytest.approx(0.0, abs=1e-6)


def test_samples_that_do_not_count_change_nothing(model_of: Callable[..., Path]) -> None:
    """With KL and entropy in the loss, which would act on groups without a signal too."""
    samples = make_samples(masked=True)
    idle = tuple(replace(s, loss_mask=(0,) * s.response_length, counts=False) for s in samples[4:])
    flags = ["--fp32", "--lr", "1e-3", "--entropy-coef", "0.1", "--use-kl-loss", "--kl-loss-coef", "0.1"]
    for more in ([], ["--calculate-per-token-loss"]):
        found = []
        for given in (samples[:4] + idle, samples[:4]):
            (batch,) = make_train_batches(
                RolloutBatch(rollout_id=0, samples=given), dp_size=1, global_batch_size=len(given), micro_batch_size=2
            )
            with started(config_of(model_of(), *flags, "--ref-load", str(model_of()), *more)) as worker:
                (metrics,) = worker.train(batch).steps
            found.append({name: value for name, value in metrics.items() if not name.startswith("perf/")})
        assert found[0] == pytest.approx(found[1], rel=1e-5, abs=1e-6)
