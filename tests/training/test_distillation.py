"""On-policy distillation: its advantages and gradients against the plain formula, and a student that comes nearer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import make_model
from tests.training.harness import batch_of, config_of, make_samples, started
from vime.algorithms.distillation import distilled, teacher_gap
from vime.errors import UserError
from vime.training.weights_io import hf_weights
from vime.types import TokenScores, TrainSample

FLAGS = ["--fp32", "--clip-grad", "0", "--use-opd", "--opd-type"]
finite = st.floats(-50, 50, width=32)


@given(st.lists(st.tuples(finite, finite, finite), min_size=1, max_size=20), st.floats(0, 3, width=32))
def test_the_gap_to_the_teacher_is_taken_off_the_advantage(rows: list[tuple[float, float, float]], coef: float) -> None:
    """A - c (log π - log π_teacher)."""
    import numpy as np

    advantages, own, teacher = (torch.tensor(column) for column in zip(*rows, strict=True))
    found = distilled(advantages, teacher_gap(own.requires_grad_(), teacher), coef)
    table = np.array(rows, dtype=np.float64)
    np.testing.assert_allclose(found.numpy(), table[:, 0] - coef * (table[:, 1] - table[:, 2]), rtol=1e-5, atol=1e-4)
    assert not found.requires_grad


def response_log_probs(plain: torch.nn.Module, sample: TrainSample) -> torch.Tensor:
    logits = plain(torch.tensor([sample.tokens])).logits[0, :-1]
    chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.tokens[1:])[:, None])[:, 0]
    return chosen[-sample.response_length :]


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return make_model(tmp_path / "teacher", "llama", seed=5)


def test_loss_and_gradient_with_a_teacher_in_the_trainer_are_the_plain_formula(
    model_of: Callable[..., Path], teacher: Path
) -> None:
    """mean over samples of mean over tokens of -A log π at ratio 1, with A = reward - 0.5 (log π - log π_teacher)."""
    from transformers import AutoModelForCausalLM

    samples = make_samples(4, seed=1)
    flags = [*FLAGS, "megatron", "--opd-teacher-load", str(teacher), "--opd-kl-coef", "0.5"]
    with started(config_of(model_of(), "--rollout-batch-size", "2", *flags)) as worker:
        (metrics,) = worker.train(batch_of(samples)).steps

    student = AutoModelForCausalLM.from_pretrained(model_of(), dtype=torch.float32)
    other = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    losses, gaps = [], []
    for sample in samples:
        own, of_teacher = response_log_probs(student, sample), response_log_probs(other, sample).detach()
        gap = own.detach() - of_teacher
        losses.append((-(sample.reward - 0.5 * gap) * (own - own.detach()).exp()).mean())
        gaps.append(gap.mean())
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None]).norm()
    assert metrics["train/opd_kl"] == pytest.approx(float(torch.stack(gaps).mean()), abs=1e-5)
    assert metrics["train/loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["perf/actor_teacher_log_probs_time"] > 0


def test_a_teacher_on_a_server_that_says_the_same_gives_the_same_step(
    model_of: Callable[..., Path], teacher: Path
) -> None:
    from transformers import AutoModelForCausalLM

    samples = make_samples(4, seed=1)
    here = ["megatron", "--opd-teacher-load", str(teacher)]
    with started(config_of(model_of(), "--rollout-batch-size", "2", *FLAGS, *here)) as worker:
        (expected,) = worker.train(batch_of(samples)).steps
    plain = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    with torch.no_grad():
        said = [tuple(response_log_probs(plain, sample).tolist()) for sample in samples]
    judged = [
        dataclasses.replace(sample, scores=TokenScores(teacher_log_probs=each))
        for sample, each in zip(samples, said, strict=True)
    ]
    there = ["vllm", "--opd-teacher-url", "http://127.0.0.1:1"]
    with started(config_of(model_of(), "--rollout-batch-size", "2", *FLAGS, *there)) as worker:
        (found,) = worker.train(batch_of(judged)).steps
        for name in ("train/loss", "train/grad_norm", "train/opd_kl"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4), name
        with pytest.raises(UserError, match=r"samples 0, 1, 2, 3: not all of them have teacher_log_probs"):
            worker.train(batch_of(samples))


def test_a_student_comes_near_its_teacher(model_of: Callable[..., Path], teacher: Path) -> None:
    """Without any reward, on its own samples: 40 rollouts of 32 answers of 4 tokens, after a prompt of one."""
    from transformers import AutoModelForCausalLM

    flags = [*FLAGS, "megatron", "--opd-teacher-load", str(teacher), "--lr", "3e-3", "--rollout-batch-size", "16"]
    student = AutoModelForCausalLM.from_pretrained(model_of(), dtype=torch.float32)
    torch.manual_seed(0)
    gaps = []
    with started(config_of(model_of(), "--num-rollout", "40", *flags)) as worker:
        for _ in range(40):
            student.load_state_dict(dict(hf_weights(worker.chunks, worker.shape)))
            answers = student.generate(
                torch.full((32, 1), 40), do_sample=True, top_k=0, max_new_tokens=4, min_new_tokens=4
            )
            (metrics,) = worker.train(batch_of([of(i, ids) for i, ids in enumerate(answers.tolist())])).steps
            gaps.append(metrics["train/opd_kl"])
    first, last = sum(gaps[:5]) / 5, sum(gaps[-5:]) / 5
    assert first > 0.5
    assert last < first / 3


def of(index: int, ids: list[int]) -> TrainSample:
    return TrainSample(
        index=index,
        group_index=index,
        tokens=tuple(ids),
        response_length=len(ids) - 1,
        loss_mask=(1,) * (len(ids) - 1),
        rollout_log_probs=None,
        weight_versions=(),
        raw_reward=0.0,
        reward=0.0,
    )
