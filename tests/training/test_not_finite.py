"""What is not a finite number is named and never trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training.harness import (
    batch_of,
    config_of,
    make_samples,
    make_step,
    started,
    started_critic,
    started_sft,
)
from vime.training.loss import Given
from vime.types import InvalidSample, TokenScores, TrainSample

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
        assert "step 1 of rollout 10 skipped" in caplog.text
        assert caplog.text.rstrip().endswith("not finite: the loss of sample 5")
        (metrics,) = worker.train(batch_of(broken)).steps
        assert metrics["train/skipped_steps"] == 0, "an infinite ratio is clamped, and counted"
        assert metrics["train/log_ratio_clamped"] == pytest.approx(1 / 8)


def test_a_sample_whose_importance_weight_is_no_number_is_named_and_the_others_are_trained(
    model_of: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    samples = make_samples()
    _, *others = samples[5].rollout_log_probs or ()
    nan = tuple(replace(s, rollout_log_probs=(float("nan"), *others)) if s.index == 5 else s for s in samples)
    masked = tuple(replace(s, loss_mask=(0,) * s.response_length) if s.index == 5 else s for s in samples)
    found = []
    for given in (nan, masked):
        with started(config_of(model_of(), "--fp32", "--lr", "1e-2", "--use-tis", "--tis-batch-normalize")) as worker:
            (metrics,) = worker.train(batch_of(given)).steps
            weights = torch.cat([p.detach().flatten() for chunk in worker.chunks for p in chunk.parameters()])
            found.append((metrics, weights))
    (metrics, weights), (_, expected) = found
    assert torch.equal(weights, expected)
    assert (metrics["train/nonfinite_samples"], metrics["train/skipped_steps"]) == (1, 0)
    assert "sample 5: a log-prob of the engine, and with it an importance weight, is not finite" in caplog.text


@pytest.mark.parametrize("flag", ["--use-tis", "--use-rollout-logprobs"])
def test_a_sample_without_log_probs_is_not_trained_on_in_another_way(model_of: Callable[..., Path], flag: str) -> None:
    samples = tuple(replace(s, rollout_log_probs=None) if s.index == 2 else s for s in make_samples())
    with (
        started(config_of(model_of(), flag)) as worker,
        pytest.raises(InvalidSample, match=f"{flag} needs rollout_log_probs of every sample; one of sample 0, 1, 2, 3"),
    ):
        worker.train(batch_of(samples))


def nan_where_masked(values: tuple[float, ...], sample: TrainSample) -> tuple[float, ...]:
    return tuple(x if bit else float("nan") for x, bit in zip(values, sample.loss_mask, strict=True))


def of_the_engine(sample: TrainSample) -> TrainSample:
    assert sample.rollout_log_probs is not None
    return replace(sample, rollout_log_probs=nan_where_masked(sample.rollout_log_probs, sample))


def of_the_teacher(sample: TrainSample) -> TrainSample:
    said = nan_where_masked((-6.0,) * sample.response_length, sample)
    return replace(sample, scores=TokenScores(teacher_log_probs=said))


TEACHER = ["--use-opd", "--opd-type", "vllm", "--opd-teacher-url", "http://127.0.0.1:1"]
WITHOUT_TRAINED = {
    "importance weights": (["--use-tis"], of_the_engine),
    "scaled weights of sequences": (
        ["--use-tis", "--tis-level", "sequence", "--tis-veto", "1e-9", "--tis-batch-normalize"],
        of_the_engine,
    ),
    "the engine's as the old ones": (["--use-rollout-logprobs"], of_the_engine),
    "teacher": (TEACHER, of_the_teacher),
    "whitened, of a teacher": ([*TEACHER, "--normalize-advantages"], of_the_teacher),
}


@pytest.mark.parametrize(("flags", "broken"), WITHOUT_TRAINED.values(), ids=WITHOUT_TRAINED)
def test_what_is_said_of_tokens_that_are_not_trained_does_not_matter(
    model_of: Callable[..., Path], flags: list[str], broken: Callable[[TrainSample], TrainSample]
) -> None:
    plain = make_samples(masked=True)
    samples = [broken(sample) for sample in plain]
    finite = [
        replace(
            sample,
            rollout_log_probs=tuple(0.5 if x != x else x for x in sample.rollout_log_probs or ()),
            scores=TokenScores(teacher_log_probs=sample.scores.teacher_log_probs and (-6.0,) * sample.response_length),
        )
        for sample in samples
    ]
    found = []
    for given in (samples, finite):
        with started(config_of(model_of(), "--fp32", "--lr", "1e-3", *flags)) as worker:
            (metrics,) = worker.train(batch_of(given)).steps
            found.append({name: value for name, value in metrics.items() if not name.startswith("perf/")})
    assert found[0]["train/skipped_steps"] == 0
    assert found[0] == found[1]


def test_values_that_are_not_finite_cost_a_critic_their_own_sample(model_of: Callable[..., Path]) -> None:
    """At a token that is not trained they cost nothing."""
    samples = make_samples(masked=True)
    values = [(0.1,) * sample.response_length for sample in samples]
    values[3] = nan_where_masked(values[3], samples[3])
    values[5] = (float("nan"),) * samples[5].response_length
    scored = [replace(s, scores=TokenScores(values=found)) for s, found in zip(samples, values, strict=True)]
    config = config_of(model_of(), "--fp32", "--advantage-estimator", "ppo")
    with started_critic(config) as critic:
        (metrics,) = critic.train(batch_of(scored)).steps
    assert metrics["train/critic_skipped_steps"] == 0
    assert 0 < metrics["train/critic_grad_norm"] < float("inf")
    with started(config) as actor:
        (metrics,) = actor.train(batch_of(scored)).steps
    assert (metrics["train/skipped_steps"], metrics["train/nonfinite_samples"]) == (0, 1)


def test_a_skipped_step_of_fine_tuning_names_its_samples(
    model_of: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    samples = make_samples()
    flags = ["--loss-type", "sft_loss", "--n-samples-per-prompt", "1", "--fp32"]
    with started_sft(config_of(model_of(), *flags)) as worker:
        packs = [worker._packer.pack([samples[i] for i in chosen]) for chosen in ((0, 1), (2, 3, 4, 5, 6, 7))]
        shared = samples[4].tokens[0]  # of the prompt of 4 and 5
        for chunk in worker.chunks:
            for name, parameter in chunk.named_parameters():
                if name.endswith("word_embeddings.weight"):
                    parameter.data[shared] = float("nan")
        hit = [str(s.index) for s in samples if shared in s.tokens[:-1]]
        given = Given(advantages_t=packs[0].rewards_n)
        metrics = worker._learner.step([(pack, given) for pack in packs], make_step(samples, (0, 1), range(2, 8)))
    assert metrics["train/skipped_steps"] == 1
    assert {"4", "5"} <= set(hit) < set(map(str, range(8)))
    assert caplog.text.rstrip().endswith(f"loss nan, grad_norm nan; not finite: the loss of sample {', '.join(hit)}")
