"""A rank of the critic: its values, its loss and gradient against plain PyTorch, its start, and exact resuming."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.algorithms.test_gae import gae_by_loops
from tests.tiny import make_model
from tests.training.harness import batch_of, config_of, make_samples, make_step, started, started_critic
from tests.training.test_step import forward, gradients_by_hf_name, load_reference
from vime.checkpoints import CRITIC, CheckpointStore
from vime.errors import UserError
from vime.models import weight_map
from vime.observe.metrics import describe
from vime.training.critic import CriticWorker
from vime.training.value_model import HEAD
from vime.training.weights_io import global_parameters
from vime.types import TokenScores, TrainBatch, TrainSample

PPO = ["--advantage-estimator", "ppo", "--lambd", "0.9", "--gamma", "0.95"]


def head_of(worker: CriticWorker) -> torch.Tensor:
    return global_parameters(worker.chunks)[HEAD]


def set_head(worker: CriticWorker, scale: float = 0.3) -> torch.Tensor:
    """A head that is not 0, as if it had learnt; to be set before the first step."""
    head = head_of(worker)
    with torch.no_grad():
        head.copy_(scale * torch.randn(head.shape, generator=torch.Generator().manual_seed(0)))
    worker.optimizer.reload_model_params()
    return head.detach().clone()


def scored(batch: TrainBatch, *workers: Any) -> TrainBatch:
    """The batch with what the workers, of one rank each, say of it."""
    samples = batch.samples
    for worker in workers:
        scores = worker.score(batch)
        samples = tuple(
            dataclasses.replace(sample, scores=sample.scores.merged(scores[sample.index])) for sample in samples
        )
    return dataclasses.replace(batch, samples=samples)


def values_written_out(model: Any, head: torch.Tensor, sample: TrainSample) -> torch.Tensor:
    """The head on the last hidden states of the transformers model, at the tokens before those of the response."""
    hidden = model.model(torch.tensor([sample.tokens])).last_hidden_state[0, -sample.response_length - 1 : -1]
    return hidden @ head[0]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_critic_starts_at_zero_with_the_weights_of_the_policy(model_of: Callable[..., Path], tied: bool) -> None:
    samples = make_samples()
    with started_critic(config_of(model_of(tied=tied), "--fp32", *PPO)) as worker:
        assert "output_layer.weight" not in global_parameters(worker.chunks)
        scores = worker.score(batch_of(samples))
        head = set_head(worker)
        later = worker.score(batch_of(samples))
    assert scores == {s.index: TokenScores(values=(0.0,) * s.response_length) for s in samples}
    model = load_reference(model_of(tied=tied))
    with torch.no_grad():
        for sample in samples:
            expected = values_written_out(model, head, sample).tolist()
            assert later[sample.index].values == pytest.approx(expected, abs=1e-5)


def written_out(
    model: Any, head: torch.Tensor, samples: Sequence[TrainSample], old: Sequence[Any], ref: Any, *, per_token: bool
) -> torch.Tensor:
    """The clipped value loss of returns with a KL (k3) of 0.2 in the reward, γ .95 and λ .9, sample by sample."""
    total = torch.zeros(())
    actor = load_reference(model.name_or_path)
    for sample, old_values in zip(samples, old, strict=True):
        with torch.no_grad():
            difference = forward(actor, sample)[0] - forward(ref, sample)[0]
        rewards = -0.2 * ((-difference).exp() - 1 + difference)
        mask = torch.tensor(sample.loss_mask)
        if mask.any():
            rewards[mask.nonzero()[-1]] += sample.reward
        size = [sample.response_length]
        advantages = gae_by_loops(rewards.tolist(), old_values.tolist(), sample.loss_mask, size, 0.95, 0.9)
        returns = torch.tensor(advantages, dtype=torch.float32) + old_values
        values = values_written_out(model, head, sample)
        held = old_values + (values - old_values).clamp(-0.1, 0.1)
        loss = torch.maximum((values - returns) ** 2, (held - returns) ** 2)
        total = total + (loss * mask).sum() / (1 if per_token else max(int(mask.sum()), 1) * len(samples))
    return total / sum(max(sample.trained_tokens, 1) for sample in samples) if per_token else total


@pytest.mark.parametrize("per_token", [False, True], ids=["per sample", "per token"])
def test_loss_and_gradient_are_those_of_the_formula(
    model_of: Callable[..., Path], tmp_path: Path, per_token: bool
) -> None:
    model, other = model_of(), make_model(tmp_path / "other", "llama", seed=1)
    samples = make_samples(masked=True)
    order = [(3, 0, 5), (1, 2, 4, 6, 7)]
    flags = ["--fp32", *PPO, "--kl-coef", "0.2", "--kl-loss-type", "k3", "--value-clip", "0.1", "--clip-grad", "0"]
    flags += ["--ref-load", str(other), "--load", str(model), *["--calculate-per-token-loss"] * per_token]
    config = config_of(model, *flags)
    batch = batch_of(samples, make_step(samples, *order))
    with started(config) as actor:
        batch = scored(batch, actor)
    generator = torch.Generator().manual_seed(0)
    with started_critic(config) as worker:
        head = set_head(worker).requires_grad_()
        batch = scored(batch, worker)
        old = [  # far enough from the values for the clip to act somewhere
            torch.tensor(sample.scores.values) + 0.3 * torch.randn(sample.response_length, generator=generator)
            for sample in batch.samples
        ]
        samples = tuple(
            dataclasses.replace(sample, scores=dataclasses.replace(sample.scores, values=tuple(values.tolist())))
            for sample, values in zip(batch.samples, old, strict=True)
        )
        (metrics,) = worker.train(batch_of(samples, *batch.steps)).steps
        found = gradients_by_hf_name(worker) | {HEAD: global_parameters(worker.chunks)[HEAD].main_grad.clone()}
    reference = load_reference(model)
    loss = written_out(reference, head, samples, old, load_reference(other), per_token=per_token)
    loss.backward()
    assert metrics["train/critic_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert 0 < metrics["train/critic_clipfrac"] < 1
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None} | {HEAD: head.grad}
    assert wanted.keys() == found.keys()
    difference = sum((found[name] - gradient).square().sum() for name, gradient in wanted.items()).sqrt()
    norm = sum(gradient.square().sum() for gradient in wanted.values()).sqrt()
    assert metrics["train/critic_grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert difference / norm < 1e-5


def batches(count: int) -> list[TrainBatch]:
    return [batch_of(make_samples(seed=seed, masked=True), rollout_id=seed) for seed in range(count)]


def learn(worker: CriticWorker, batch: TrainBatch) -> dict[str, float]:
    (metrics,) = worker.train(scored(batch, worker)).steps
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def test_a_critic_learns_what_answers_earn(model_of: Callable[..., Path]) -> None:
    """The same answers, each to a prompt of its own, again and again: in the end it knows what each leads to."""
    flags = ["--fp32", *PPO, "--lr", "3e-3", "--gamma", "1", "--lambd", "1", "--value-clip", "10"]
    with started_critic(config_of(model_of(), *flags)) as worker:
        found = [learn(worker, batch_of(make_samples(16)[::2])) for _ in range(30)]
    assert all(describe(name) for name in found[0]), "every metric is known by name"
    assert found[0]["rollout/values"] == 0.0
    assert found[0]["rollout/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert found[-1]["rollout/explained_variance"] > 0.9
    assert found[-1]["train/critic_loss"] < 0.1 * found[0]["train/critic_loss"]


def test_a_critic_forgets_its_moments_too(model_of: Callable[..., Path]) -> None:
    found = {}
    for flags in ([], ["--reset-optimizer-states"]):
        with started_critic(config_of(model_of(), "--fp32", *PPO, "--lr", "1e-3", *flags)) as worker:
            learn(worker, batch_of(make_samples()))
            states = [
                state["exp_avg"]
                for part in worker.optimizer.chained_optimizers
                for state in part.optimizer.state.values()
                if "exp_avg" in state
            ]
            found[bool(flags)] = sum(float(moment.abs().sum()) for moment in states)
    assert found[False] > 0
    assert found[True] == 0


@pytest.mark.parametrize("removed", [0, 2], ids=["all trained", "samples without a trained token"])
def test_explained_variance_is_that_of_the_trained_tokens(model_of: Callable[..., Path], removed: int) -> None:
    """With --calculate-per-token-loss every token counts once, and the returns are the rewards (λ = γ = 1)."""
    samples = tuple(
        dataclasses.replace(s, loss_mask=(0,) * s.response_length) if s.index < removed else s for s in make_samples()
    )
    flags = ["--fp32", "--advantage-estimator", "ppo", "--calculate-per-token-loss"]
    with started_critic(config_of(model_of(), *flags)) as worker:
        set_head(worker)
        batch = scored(batch_of(samples), worker)
        (metrics,) = worker.train(batch).steps
    trained = [s for s in batch.samples if s.trained_tokens]
    returns = torch.tensor([s.reward for s in trained for _ in s.loss_mask], dtype=torch.float64)
    values = torch.tensor([v for s in trained for v in s.scores.values or ()], dtype=torch.float64)
    expected = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
    assert metrics["rollout/explained_variance"] == pytest.approx(float(expected), rel=1e-4)


def more_than_expected(args: Any, rollout_data: dict[str, Any]) -> None:
    """Advantages of actor and critic alike: the reward, less what the critic expected."""
    pairs = zip(rollout_data["values"], rollout_data["rewards"], strict=True)
    rollout_data["advantages"] = [reward - values for values, reward in pairs]
    assert args.role in ("actor", "critic") and len(rollout_data["log_probs"]) == len(rollout_data["rewards"])


def test_custom_advantages_are_those_of_the_critic_too(model_of: Callable[..., Path]) -> None:
    """Returns are advantages and values together: here the rewards."""
    config = config_of(model_of(), "--fp32", *PPO, "--custom-advantage-function-path", f"{__name__}:more_than_expected")
    batch = batch_of(make_samples(masked=True))
    with started(config) as actor:
        batch = scored(batch, actor)
        assert batch.samples[0].scores.ref_log_probs is None, "there is no reference"
    with started_critic(config) as critic:
        set_head(critic)
        batch = scored(batch, critic)
        (of_critic,) = critic.train(batch).steps
    with started(config) as actor:
        (of_actor,) = actor.train(batch).steps
    mean_reward = sum(sample.reward for sample in batch.samples) / len(batch.samples)
    assert of_critic["rollout/returns"] == pytest.approx(mean_reward, rel=1e-5)
    assert of_actor["rollout/advantages"] == pytest.approx(mean_reward - of_critic["rollout/values"], rel=1e-4)


def with_returns(args: Any, rollout_data: dict[str, Any]) -> None:
    """Returns of 2 whatever the advantages are; those of the first sample are not finite."""
    rollout_data["advantages"] = [torch.ones_like(values) for values in rollout_data["values"]]
    rollout_data["returns"] = [torch.full_like(values, 2.0) for values in rollout_data["values"]]
    rollout_data["returns"][0].fill_(float("nan"))


def test_a_critic_learns_the_returns_that_a_custom_function_sets(model_of: Callable[..., Path]) -> None:
    config = config_of(model_of(), "--fp32", *PPO, "--custom-advantage-function-path", f"{__name__}:with_returns")
    batch = batch_of(make_samples())
    with started(config) as actor:
        batch = scored(batch, actor)
    with started_critic(config) as critic:
        (metrics,) = critic.train(scored(batch, critic)).steps
    assert metrics["rollout/returns"] == pytest.approx(2 * (len(batch.samples) - 1) / len(batch.samples))
    assert metrics["train/critic_loss"] > 0 and metrics["train/critic_grad_norm"] > 0, "neither is NaN"


def save_with_critic(worker: CriticWorker, root: Path, rollout_id: int) -> None:
    """A checkpoint of a whole run as far as the critic reads it."""
    store = CheckpointStore(root)
    folder = store.begin(rollout_id)
    (folder / CRITIC).mkdir()
    worker.save(folder / CRITIC)
    store.commit(rollout_id, {"cursor": 5})


@pytest.mark.parametrize("precision", ["--bf16", "--fp32"])
def test_a_run_that_is_resumed_goes_on_bit_for_bit(
    model_of: Callable[..., Path], tmp_path: Path, precision: str
) -> None:
    flags = [precision, *PPO, "--critic-lr", "1e-2", "--lr-decay-style", "cosine"]
    config = config_of(model_of(), *flags, "--load", str(tmp_path), "--save", str(tmp_path))
    with started_critic(config) as worker:
        uninterrupted = [learn(worker, batch) for batch in batches(2)]
        save_with_critic(worker, tmp_path, 1)
        uninterrupted += [learn(worker, batch) for batch in batches(4)[2:]]
    with started_critic(config) as worker:
        assert worker.info.resumed_from == str(tmp_path / "iter_0000001" / CRITIC)  # type: ignore[attr-defined]
        resumed = [learn(worker, batch) for batch in batches(4)[2:]]
    assert resumed == uninterrupted[2:]
    assert resumed[0]["rollout/values"] != 0.0


def test_a_critic_with_a_root_of_its_own_is_resumed_at_the_rollout_of_the_actor(
    model_of: Callable[..., Path], tmp_path: Path
) -> None:
    actor, own = tmp_path / "actor", tmp_path / "critic"
    flags = ["--fp32", *PPO, "--critic-lr", "1e-2", "--load", str(actor), "--save", str(actor)]
    config = config_of(model_of(), *flags)
    with started_critic(config) as worker:
        for rollout_id, batch in enumerate(batches(3)):
            learn(worker, batch)
            store = CheckpointStore(own)
            worker.save(store.begin(rollout_id))
            store.commit(rollout_id, {"id": f"unit {rollout_id}"})
            if rollout_id == 1:
                head = head_of(worker).detach().clone()
    store = CheckpointStore(actor)  # the run was killed after the critic of rollout 2 and before the actor
    store.begin(1)
    store.commit(1, {CRITIC: {"root": str(own), "id": "unit 1"}})
    with started_critic(config_of(model_of(), *flags, "--critic-load", str(own))) as worker:
        assert torch.equal(head_of(worker), head)
    with (
        pytest.raises(UserError, match=f"its critic was saved to {own}; give that as --critic-load"),
        started_critic(config),
    ):
        pass
    store.begin(1)
    store.commit(1, {CRITIC: {"root": str(own), "id": "another"}})
    with (
        pytest.raises(UserError, match=f"--critic-load {own} does not have the critic of"),
        started_critic(config_of(model_of(), *flags, "--critic-load", str(own))),
    ):
        pass


@pytest.mark.parametrize("ckpt_format", ["torch_dist", "torch"])
def test_a_critic_starts_from_a_critic_or_a_policy(
    model_of: Callable[..., Path], tmp_path: Path, ckpt_format: str
) -> None:
    """--critic-load: a whole run's checkpoint gives its critic; one of a policy gives all but the head."""
    other = make_model(tmp_path / "other", "llama", seed=3)
    flags = ["--fp32", *PPO, "--ckpt-format", ckpt_format]
    run, policy = tmp_path / "run", tmp_path / "policy"
    with started_critic(config_of(other, *flags)) as worker:
        head = set_head(worker)
        expected = global_parameters(worker.chunks)["decoder.final_layernorm.weight"].clone()
        save_with_critic(worker, run, 0)
    with started(config_of(other, *flags)) as actor:
        store = CheckpointStore(policy)
        actor.save(store.begin(0))
        store.commit(0, {})
    for root, wanted in ((run, head), (policy, torch.zeros_like(head)), (other, torch.zeros_like(head))):
        with started_critic(config_of(model_of(), *flags, "--critic-load", str(root))) as worker:
            assert torch.equal(head_of(worker), wanted)
            assert torch.equal(global_parameters(worker.chunks)["decoder.final_layernorm.weight"], expected)


def test_the_head_is_the_only_weight_that_a_policy_has_not(model_of: Callable[..., Path]) -> None:
    with started_critic(config_of(model_of(), *PPO)) as worker:
        known = {name for rule in weight_map(worker.shape) for name in (rule.megatron, *rule.copies)}
        assert global_parameters(worker.chunks).keys() - known == {HEAD}
