"""Every loss and every option of it: value and gradient against the same formula in plain PyTorch.

The formulas here are written sample by sample, on the transformers model, without anything of ``vime.algorithms``. One
worker learns all of the objectives one after the other, at a learning rate of 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.tiny import make_model
from tests.training.harness import batch_of, config_of, make_samples, make_step, started
from tests.training.test_step import _NoClock, forward, gradients_by_hf_name, load_reference
from vime.training.loss import Given, LossSettings, PolicyObjective
from vime.training.worker import TrainWorker

TOLERANCE = 1e-5  # relative, of the loss and of the gradient as a whole, fp32
PACKS = [(3, 0, 5), (1, 2, 4, 6, 7)]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is known of the tokens of one sample, each [T]."""

    new: Tensor  # with gradient
    old: Tensor
    ref: Tensor
    rollout: Tensor
    entropy: Tensor  # with gradient
    mask: Tensor
    advantage: float

    @property
    def ratio(self) -> Tensor:
        return (self.new - self.old).exp()

    def mean(self, values: Tensor) -> Tensor:
        return (values * self.mask).sum() / max(float(self.mask.sum()), 1.0)


Loss = Callable[[Answer], Tensor]


def clipped(ratio: Tensor, advantage: float, dual: float | None = None) -> Tensor:
    """PPO's objective with clips at .8 and 1.3, as the paper writes it: what to maximize."""
    objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
    if dual is not None and advantage < 0:
        objective = torch.maximum(objective, torch.tensor(dual * advantage))
    return -objective


def grpo(answer: Answer) -> Tensor:
    return clipped(answer.ratio, answer.advantage)


def gspo(answer: Answer) -> Tensor:
    return clipped(answer.mean(answer.new - answer.old).exp(), answer.advantage).expand(len(answer.new))


def cispo(answer: Answer) -> Tensor:
    return -answer.ratio.detach().clamp(0.8, 1.3) * answer.advantage * answer.new


def on_engine_log_probs(answer: Answer) -> Tensor:
    return clipped((answer.new - answer.rollout).exp(), answer.advantage)


def with_kl(estimate: Callable[[Tensor], Tensor], *, unbiased: bool = False, limit: float = 1e9) -> Loss:
    def loss(answer: Answer) -> Tensor:
        values = estimate(answer.new - answer.ref) * (answer.ratio if unbiased else 1)
        return grpo(answer) + 0.5 * values.clamp(-limit, limit)

    return loss


def k3(d: Tensor) -> Tensor:
    return (-d).exp() - 1 + d


def weighted(weights: Callable[[Answer, Tensor], Tensor], level: str = "token", policy: Loss = grpo) -> Loss:
    """``weights`` makes a weight of each ratio of trainer to engine."""

    def loss(answer: Answer) -> Tensor:
        logs = answer.old - answer.rollout
        if level != "token":
            logs = (answer.mean(logs) if level == "geometric" else (logs * answer.mask).sum()).expand(len(logs))
        return policy(answer) * weights(answer, logs.exp())

    return loss


def truncated(answer: Answer, ratio: Tensor) -> Tensor:
    return ratio.clamp(max=1.1)


def inside(answer: Answer, ratio: Tensor) -> Tensor:
    return ratio * ((ratio >= 0.7) & (ratio <= 1.5))


def vetoed(answer: Answer, ratio: Tensor) -> Tensor:
    kept = bool(((answer.old - answer.rollout).exp()[answer.mask.bool()] >= 0.5).all())
    return ratio.clamp(0.9, 1.1) * kept


def without_left_behind(answer: Answer) -> Tensor:
    moved = float(answer.mean(answer.old - answer.new.detach()))
    return grpo(answer) * (0.0 if answer.advantage < 0 and moved > 0.05 else 1.0)


TIS = ["--use-tis", "--tis-clip", "1.1"]
OBJECTIVES: dict[str, tuple[list[str], Loss]] = {
    "grpo": ([], grpo),
    "grpo, dual clip": (["--eps-clip-c", "1.5"], lambda a: clipped(a.ratio, a.advantage, dual=1.5)),
    "gspo": (["--advantage-estimator", "gspo"], gspo),
    "cispo": (["--advantage-estimator", "cispo"], cispo),
    "reinforce++": (["--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages"], grpo),
    "entropy": (["--entropy-coef", "0.1"], lambda a: grpo(a) - 0.1 * a.entropy),
    "k1": (["--kl-loss-type", "k1"], with_kl(lambda d: d)),
    "k2": (["--kl-loss-type", "k2"], with_kl(lambda d: d.square() / 2)),
    "k3": (["--kl-loss-type", "k3"], with_kl(k3)),
    "low_var_kl": (["--kl-loss-type", "low_var_kl"], with_kl(k3, limit=10.0)),
    "k1, unbiased": (["--kl-loss-type", "k1", "--use-unbiased-kl"], with_kl(lambda d: d, unbiased=True)),
    "k3, unbiased": (["--kl-loss-type", "k3", "--use-unbiased-kl"], with_kl(k3, unbiased=True)),
    "engine's log-probs": (["--use-rollout-logprobs"], on_engine_log_probs),
    "tis": (TIS, weighted(truncated)),
    "tis, lower clip": ([*TIS, "--tis-clip-low", "0.9"], weighted(lambda _, ratio: ratio.clamp(0.9, 1.1))),
    "tis on gspo": ([*TIS, "--advantage-estimator", "gspo"], weighted(truncated, policy=gspo)),
    "icepop": (["--use-tis", "--tis-mode", "mask", "--tis-clip-low", "0.7", "--tis-clip", "1.5"], weighted(inside)),
    "sequence": ([*TIS, "--tis-level", "sequence", "--tis-mode", "truncate"], weighted(truncated, "sequence")),
    "geometric mask": (
        ["--use-tis", "--tis-level", "geometric", "--tis-mode", "mask", "--tis-clip-low", "0.7", "--tis-clip", "1.5"],
        weighted(inside, "geometric"),
    ),
    "veto": ([*TIS, "--tis-clip-low", "0.9", "--tis-veto", "0.5"], weighted(vetoed)),
    "opsm": (["--use-opsm", "--opsm-delta", "0.05"], without_left_behind),
}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A model, its reference, and samples of an old policy that is far enough for every clip to act somewhere."""

    model: Path
    other: Path
    samples: Sequence[Any]
    old: Sequence[Tensor]
    worker: TrainWorker
    actor: Any
    ref: Any

    def answers(self) -> list[Answer]:
        found = []
        for sample, old in zip(self.samples, self.old, strict=True):
            new, entropy = forward(self.actor, sample)
            with torch.no_grad():
                ref, _ = forward(self.ref, sample)
            mask, rollout = torch.tensor(sample.loss_mask).float(), torch.tensor(sample.rollout_log_probs)
            each = Answer(
                new=new, old=old, ref=ref, rollout=rollout, entropy=entropy, mask=mask, advantage=sample.reward
            )
            found.append(each)
        return found

    def learn(self, flags: Sequence[str]) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Metrics and gradients of the worker."""
        kl = ["--use-kl-loss", "--kl-loss-coef", "0.5"] if "--kl-loss-type" in flags else []
        flags = ["--fp32", "--eps-clip", "0.2", "--eps-clip-high", "0.3", "--ref-load", str(self.other), *kl, *flags]
        settings = LossSettings.of(config_of(self.model, "--num-steps-per-rollout", "2", *flags))
        worker = self.worker
        worker._learner.objective = PolicyObjective(settings, 1.0)
        packs = [worker._packer.pack([self.samples[i] for i in chosen]) for chosen in PACKS]
        with worker._weight_sets.use("ref"):
            refs = worker._log_probs(packs) if kl else [None, None]
        givens = [
            Given(
                advantages_t=pack.rewards_n.repeat_interleave(pack.lengths_n),
                old_log_probs_t=pack.rollout_log_probs_t
                if settings.rollout_is_old
                else torch.cat([self.old[i] for i in chosen]),
                ref_log_probs_t=ref,
            )
            for pack, ref, chosen in zip(packs, refs, PACKS, strict=True)
        ]
        metrics = worker._learner.step(list(zip(packs, givens, strict=True)), make_step(self.samples, *PACKS))
        return metrics, gradients_by_hf_name(worker)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("objectives")
    model, other = make_model(folder / "a" / "m", "llama"), make_model(folder / "b" / "m", "llama", seed=1)
    generator = torch.Generator().manual_seed(0)

    def noise(length: int, size: float) -> Tensor:
        return size * torch.randn(length, generator=generator)

    actor, ref = load_reference(model), load_reference(other)
    samples, old = [], []
    for sample in make_samples(masked=True):
        with torch.no_grad():
            log_probs, _ = forward(actor, sample)
        old.append(log_probs + noise(sample.response_length, 0.4))
        rollout = old[-1] + noise(sample.response_length, 0.3)
        samples.append(dataclasses.replace(sample, rollout_log_probs=tuple(rollout.tolist())))
    flags = ["--fp32", "--lr", "0", "--clip-grad", "0", "--use-kl-loss", "--ref-load", str(other), "--load", str(model)]
    with started(config_of(model, *flags)) as worker:
        yield Scene(model=model, other=other, samples=samples, old=old, worker=worker, actor=actor, ref=ref)


def check(scene: Scene, flags: Sequence[str], loss: Tensor) -> dict[str, float]:
    scene.actor.zero_grad()
    loss.backward()
    metrics, found = scene.learn(flags)
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=TOLERANCE)
    wanted = {name: parameter.grad for name, parameter in scene.actor.named_parameters()}
    assert wanted.keys() == found.keys()
    difference = sum((found[name] - gradient).square().sum() for name, gradient in wanted.items()).sqrt()
    norm = sum(gradient.square().sum() for gradient in wanted.values()).sqrt()
    assert norm > 0.01
    assert difference / norm < TOLERANCE
    return metrics


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_are_those_of_the_formula(scene: Scene, name: str) -> None:
    flags, loss = OBJECTIVES[name]
    answers = scene.answers()
    whole, plain = (torch.stack([a.mean(each(a)) for a in answers]).mean() for each in (loss, grpo))
    assert name in ("grpo", "reinforce++") or abs(whole.item() - plain.item()) > 1e-3, "the option acts somewhere"
    check(scene, flags, whole)


@pytest.mark.parametrize("name", ["gspo", "cispo", "sequence", "opsm"])
def test_the_same_with_a_mean_over_tokens(scene: Scene, name: str) -> None:
    flags, loss = OBJECTIVES[name]
    answers = scene.answers()
    total = torch.stack([(loss(answer) * answer.mask).sum() for answer in answers]).sum()
    tokens = sum(max(float(answer.mask.sum()), 1.0) for answer in answers)
    check(scene, [*flags, "--calculate-per-token-loss"], total / tokens)


def test_dr_grpo_divides_the_policy_loss_by_a_constant_and_the_rest_as_ever(scene: Scene) -> None:
    answers = scene.answers()
    policy = torch.stack([(grpo(answer) * answer.mask).sum() / 20 for answer in answers]).mean()
    entropy = torch.stack([answer.mean(answer.entropy) for answer in answers]).mean()
    flags = ["--use-dr-grpo", "--dr-grpo-divisor", "20", "--entropy-coef", "0.1"]
    metrics = check(scene, flags, policy - 0.1 * entropy)
    assert metrics["train/pg_loss"] == pytest.approx(policy.item(), rel=TOLERANCE)
    assert metrics["train/entropy_loss"] == pytest.approx(entropy.item(), rel=TOLERANCE)


def test_how_trainer_and_engine_differ_is_reported_whether_it_is_corrected_or_not(scene: Scene) -> None:
    answers = scene.answers()

    def mean(values: Callable[[Tensor], Tensor]) -> float:
        return float(torch.stack([a.mean(values(a.old - a.rollout)) for a in answers]).mean())

    expected = {
        "train/train_rollout_logprob_abs_diff": mean(lambda d: d.abs()),
        "train/mismatch_kl": mean(lambda d: -d),
        "train/mismatch_k3_kl": mean(lambda d: d.exp() - 1 - d),
        "train/tis_abs": mean(lambda d: (d.exp() - 1).abs()),
        "train/ois": float(torch.stack([a.mean(a.ratio.detach()) for a in answers]).mean()),
    }
    for flags, high in (([], 2.0), (TIS, 1.1)):
        metrics, _ = scene.learn(flags)
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert metrics["train/tis"] == pytest.approx(mean(lambda d: d.exp().clamp(max=high)), rel=1e-4)  # noqa: B023
        assert metrics["train/tis_clipfrac"] == pytest.approx(mean(lambda d: (d.exp() > high).float()), abs=1e-6)  # noqa: B023


def returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """From the last trained token back, over trained tokens alone."""
    found, following = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        if mask[t]:
            following = found[t] = rewards[t] + gamma * following
    return found


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_advantages_pay_for_the_kl_and_are_whitened(scene: Scene, name: str) -> None:
    flags = ["--fp32", "--advantage-estimator", name, "--normalize-advantages", "--kl-coef", "0.3", "--gamma", "0.9"]
    flags += ["--kl-loss-type", "k3", "--ref-load", str(scene.other), "--load", str(scene.model)]
    packs = [scene.worker._packer.pack([scene.samples[i] for i in chosen]) for chosen in PACKS]
    batch = batch_of(scene.samples, make_step(scene.samples, *PACKS))
    with mock.patch.object(scene.worker, "config", config_of(scene.model, *flags)):
        given = scene.worker._given(batch, packs, _NoClock())  # type: ignore[arg-type]
    expected = []
    for answer in scene.answers():
        penalty = 0.3 * k3(answer.new.detach() - answer.ref)
        if name == "reinforce_plus_plus":
            rewards = -penalty
            rewards[answer.mask.nonzero().max()] += answer.advantage
            expected.append(returns(rewards, answer.mask, 0.9))
        else:
            expected.append(answer.advantage - penalty)
    trained = torch.cat(expected)[torch.cat([answer.mask for answer in scene.answers()]).bool()]
    for each, chosen in zip(given, PACKS, strict=True):
        whitened = torch.cat([(expected[i] - trained.mean()) / trained.std() for i in chosen])
        masks = torch.tensor([bit for i in chosen for bit in scene.samples[i].loss_mask]).bool()
        torch.testing.assert_close(each.advantages_t[masks], whitened[masks], rtol=1e-4, atol=1e-5)
