"""What is not a finite number is named and never trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training.harness import batch_of, config_of, make_samples, make_step, started
from vime.types import InvalidSample

KL = ["--advantage-estimator", "reinforce_plus_plus_baseline", "--normalize-advantages", "--kl-coef", "0.1"]


def test_a_sample_whose_advantages_are_not_finite_keeps_its_place_and_teaches_nothing(
    model_of: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    samples = make_samples()
    broken = tuple(replace(sample, reward=float("nan")) if sample.index == 3 else sample for sample in samples)
    masked = tuple(replace(s, loss_mask=(0,) * s.response_length) if s.index == 3 else s for s in samples)
    found = []
    for given in (broken, masked):
        flags = ["--fp32", "--lr", "1e-3", "--num-steps-per-rollout", "2", *KL, "--ref-load", str(model_of())]
        with started(config_of(model_of(), *flags)) as worker:
            halves = [make_step(given[:4], (0, 1), (2, 3)), make_step(samples[4:], (4, 5), (6, 7))]
            steps = worker.train(batch_of(given, *halves)).steps
            weights = torch.cat([p.detach().flatten() for chunk in worker.chunks for p in chunk.parameters()])
            found.append((steps, weights))
    (steps, weights), (expected_steps, expected) = found
    assert torch.equal(weights, expected)
    assert [step["train/nonfinite_samples"] for step in steps] == [1, 0]
    assert [step["train/nonfinite_samples"] for step in expected_steps] == [0, 0]
    assert [step["train/skipped_steps"] for step in steps] == [0, 0]
    assert "sample 3: an advantage is not finite; not trained on" in caplog.text


def test_a_skipped_step_names_the_samples_that_caused_it(
    model_of: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    samples = make_samples()
    infinite = (float("inf"),) * samples[5].response_length
    broken = tuple(replace(s, rollout_log_probs=infinite) if s.index == 5 else s for s in samples)
    with started(config_of(model_of(), "--fp32", "--lr", "1e-2", "--use-rollout-logprobs")) as worker:
        before = [p.detach().clone() for chunk in worker.chunks for p in chunk.parameters()]
        nan = tuple(
            replace(s, rollout_log_probs=(float("nan"),) * len(infinite)) if s.index == 5 else s for s in broken
        )
        (metrics,) = worker.train(batch_of(nan, make_step(nan, (0, 1, 5), (2, 3, 4, 6, 7)), rollout_id=9)).steps
        after = [p.detach().clone() for chunk in worker.chunks for p in chunk.parameters()]
        assert metrics["train/skipped_steps"] == 1
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
        assert "step 0 of rollout 9 skipped" in caplog.text
        assert caplog.text.rstrip().endswith("not finite: the loss of sample 5")
        (metrics,) = worker.train(batch_of(broken)).steps
        assert metrics["train/skipped_steps"] == 0, "an infinite ratio is clamped, and counted"
        assert metrics["train/log_ratio_clamped"] == pytest.approx(1 / 8)


@pytest.mark.parametrize("flag", ["--use-tis", "--use-rollout-logprobs"])
def test_a_sample_without_log_probs_is_not_trained_on_in_another_way(model_of: Callable[..., Path], flag: str) -> None:
    samples = tuple(replace(s, rollout_log_probs=None) if s.index == 2 else s for s in make_samples())
    with (
        started(config_of(model_of(), flag)) as worker,
        pytest.raises(InvalidSample, match=f"{flag} needs rollout_log_probs of every sample; one of sample 0, 1, 2, 3"),
    ):
        worker.train(batch_of(samples))
