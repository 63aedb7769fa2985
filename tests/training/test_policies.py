"""Which weights count as the old policy and as the reference, and what the optimizer remembers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.training.harness import batch_of, config_of, make_samples, make_step, started
from vime.checkpoints import CheckpointStore
from vime.training.worker import TrainWorker
from vime.types import TrainBatch, TrainSample

LEARN = ["--fp32", "--lr", "1e-2"]


def sampled_by(version: int, seed: int = 0) -> tuple[TrainSample, ...]:
    return tuple(
        replace(sample, weight_versions=(version,) * sample.response_length) for sample in make_samples(seed=seed)
    )


def log_probs(worker: TrainWorker, samples: Sequence[TrainSample]) -> Tensor:
    (found,) = worker._log_probs([worker._packer.pack(samples)])
    assert found is not None
    return found


def mean_log_prob(worker: TrainWorker, samples: Sequence[TrainSample]) -> float:
    parts = log_probs(worker, samples).split([sample.response_length for sample in samples])
    return float(torch.stack([part.mean() for part in parts]).mean())


def test_the_old_policy_is_the_one_that_sampled_however_far_training_has_gone(model_of: Callable[..., Path]) -> None:
    """As in a run that samples the next rollout while it trains on this one: version 2 is exported before the samples
    of version 1 are trained on."""
    with started(config_of(model_of(), *LEARN, "--keep-old-actor")) as worker:
        worker.export_weights()
        first = mean_log_prob(worker, sampled_by(1))
        worker.train(batch_of(sampled_by(1, seed=5)))
        worker.export_weights()
        second = mean_log_prob(worker, sampled_by(2))
        assert abs(first - second) > 0.01
        (metrics,) = worker.train(batch_of(sampled_by(1))).steps
        assert metrics["rollout/log_probs"] == pytest.approx(first, abs=1e-5)
        assert metrics["train/ppo_kl"] == pytest.approx(first - second, abs=1e-5)
        assert metrics["train/ois"] != pytest.approx(1.0, abs=1e-3)
        (metrics,) = worker.train(batch_of(sampled_by(2))).steps
        assert metrics["rollout/log_probs"] == pytest.approx(second, abs=1e-5)
        assert [name for name in worker._weight_sets._sets if name.startswith("sampled")] == ["sampled by version 2"]
        for unknown in (sampled_by(1), sampled_by(9), tuple(replace(s, weight_versions=()) for s in sampled_by(2))):
            (metrics,) = worker.train(batch_of(unknown)).steps
            assert metrics["rollout/log_probs"] == pytest.approx(second, abs=1e-5), "the nearest that is kept"


def test_weights_that_stay_as_they_are_are_kept_once(model_of: Callable[..., Path]) -> None:
    """As while only a critic learns: the engines get the same weights again and again, and nobody uses the copies."""
    with started(config_of(model_of(), *LEARN, "--keep-old-actor")) as worker:
        for _ in range(3):
            worker.export_weights()
        expected = mean_log_prob(worker, sampled_by(3))
        assert [name for name in worker._weight_sets._sets if name.startswith("sampled")] == ["sampled by version 1"]
        for version in (2, 3):
            (metrics,) = worker.train(batch_of(sampled_by(version))).steps
            assert metrics["rollout/log_probs"] == pytest.approx(expected, abs=1e-5)
        worker.export_weights()
        assert [name for name in worker._weight_sets._sets if name.startswith("sampled")] == [
            "sampled by version 1",
            "sampled by version 4",
        ]
        worker.train(batch_of(sampled_by(4)))
        assert "sampled by version 1" not in worker._weight_sets


def test_versions_go_on_where_a_resumed_run_left_them(model_of: Callable[..., Path], tmp_path: Path) -> None:
    flags = [*LEARN, "--keep-old-actor", "--load", str(tmp_path), "--save", str(tmp_path)]
    with started(config_of(model_of(), *flags)) as worker:
        worker.train(batch_of(sampled_by(1)))
        store = CheckpointStore(tmp_path)
        worker.save(store.begin(0))
        store.commit(0, {"weight_version": 7})
    with started(config_of(model_of(), *flags)) as worker:
        worker.export_weights()  # the first sync brings the weights of the checkpoint again
        expected = mean_log_prob(worker, sampled_by(7))
        assert "sampled by version 7" in worker._weight_sets
        (metrics,) = worker.train(batch_of(sampled_by(7))).steps
    assert metrics["rollout/log_probs"] == pytest.approx(expected, abs=1e-5)


def test_the_engines_log_probs_can_be_the_old_ones(model_of: Callable[..., Path]) -> None:
    samples = make_samples()
    with started(config_of(model_of(), *LEARN, "--use-rollout-logprobs")) as worker:
        current = mean_log_prob(worker, samples)
        (metrics,) = worker.train(batch_of(samples)).steps
    means = [sum(sample.rollout_log_probs or ()) / sample.response_length for sample in samples]
    rollout = sum(means) / len(means)
    assert metrics["rollout/log_probs"] == metrics["rollout/rollout_log_probs"] == pytest.approx(rollout, rel=1e-5)
    assert metrics["train/ppo_kl"] == pytest.approx(rollout - current, rel=1e-5)
    assert metrics["train/mismatch_kl"] == pytest.approx(rollout - current, rel=1e-5), "still trainer against engine"
    assert "perf/actor_log_probs_time" not in metrics, "no pass of its own"


@pytest.mark.parametrize("steps", [1, 2])
def test_weights_of_a_step_can_be_scaled_to_a_mean_of_one(model_of: Callable[..., Path], steps: int) -> None:
    words = ["--fp32", "--lr", "0", "--clip-grad", "0", "--calculate-per-token-loss"]
    words += ["--num-steps-per-rollout", str(steps), "--use-tis", "--tis-clip", "1.1", "--tis-veto", "0.3"]
    samples = make_samples(masked=True)
    made = [make_step(samples[:4], (0, 1), (2, 3)), make_step(samples[4:], (6, 5), (4, 7))]
    batch = batch_of(samples, *(made if steps == 2 else [make_step(samples, (0, 5, 2), (1, 3, 4, 6, 7))]))
    found = []
    for flags in ([], ["--tis-batch-normalize"]):
        with started(config_of(model_of(), *words, *flags)) as worker:
            found.append(worker.train(batch).steps)
    for plain, scaled in zip(*found, strict=True):
        assert 0 < plain["train/tis"] < 0.9, "the mean over trained tokens"
        assert scaled["train/pg_loss"] == pytest.approx(plain["train/pg_loss"] / plain["train/tis"], rel=1e-5)
        assert scaled["train/grad_norm"] == pytest.approx(plain["train/grad_norm"] / plain["train/tis"], rel=1e-5)


def rollouts(count: int, start: int = 0) -> list[TrainBatch]:
    return [batch_of(make_samples(seed=seed), rollout_id=seed) for seed in range(start, start + count)]


def test_the_reference_follows_the_actor_and_a_resumed_run_has_it_too(
    model_of: Callable[..., Path], tmp_path: Path
) -> None:
    flags = [*LEARN, "--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-load", str(model_of())]
    flags += ["--ref-update-interval", "2", "--load", str(tmp_path), "--save", str(tmp_path)]
    with started(config_of(model_of(), *flags)) as worker:
        kl = [worker.train(batch).steps[0]["train/kl_loss"] for batch in rollouts(3)]
        assert kl[0] == 0, "nothing has moved"
        assert kl[1] != 0
        assert kl[2] == 0, "after two rollouts the reference is the actor"
        store = CheckpointStore(tmp_path)
        worker.save(store.begin(2))
        store.commit(2, {})
        uninterrupted = [worker.train(batch).steps[0]["train/kl_loss"] for batch in rollouts(2, start=3)]
    with started(config_of(model_of(), *flags)) as worker:
        resumed = [worker.train(batch).steps[0]["train/kl_loss"] for batch in rollouts(2, start=3)]
    assert resumed == uninterrupted
    assert uninterrupted[0] != 0 and uninterrupted[1] == 0


def test_moments_can_be_forgotten_after_each_rollout(model_of: Callable[..., Path]) -> None:
    """Then every rollout starts as a fresh optimizer does: Adam's first step is as long as the learning rate."""
    (batch,) = rollouts(1)
    moved = {}
    for flags in ([], ["--reset-optimizer-states"]):
        with started(config_of(model_of(), *LEARN, "--clip-grad", "0", "--weight-decay", "0", *flags)) as worker:
            for _ in range(2):
                before = [p.detach().clone() for chunk in worker.chunks for p in chunk.parameters()]
                worker.train(batch)
            after = [p.detach() for chunk in worker.chunks for p in chunk.parameters()]
            steps = [(x - y).abs() for x, y in zip(after, before, strict=True)]
            moved[bool(flags)] = torch.cat([step.flatten() for step in steps])
    fresh = moved[True]
    assert float(fresh[fresh > 1e-4].median()) == pytest.approx(1e-2, rel=1e-3)
    assert float(moved[False].max()) != pytest.approx(1e-2, rel=1e-3)
