"""Fine-tuning on given dialogues: the loss of transformers, under every reduction, packing and split of the work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.harness import config_of, free_port, make_samples, on_ranks, started_sft
from vime.cluster.training_job import batch_options
from vime.config import Config
from vime.data.batching import make_eval_batches, make_train_batches
from vime.types import RolloutBatch, TrainSample

FLAGS = ["--loss-type", "sft_loss", "--n-samples-per-prompt", "1", "--fp32", "--lr", "1e-3", "--clip-grad", "0"]
PACKED = ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "24"]
SAMPLES = make_samples(8, seed=3, masked=True)
LAYOUTS: dict[str, list[str]] = {
    "dp2": [],
    "cp2": ["--context-parallel-size", "2"],
    "pp2": ["--pipeline-model-parallel-size", "2"],
}


def reference(model: Path, samples: tuple[TrainSample, ...], per_token: bool) -> tuple[float, float]:
    """Loss and norm of its gradient, by transformers and the formulas of the mean."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sums, counts = [], []
    for sample in samples:
        logits = plain(torch.tensor([sample.tokens])).logits[0]
        losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(sample.tokens[1:]), reduction="none")
        sums.append((losses[-sample.response_length :] * torch.tensor(sample.loss_mask)).sum())
        counts.append(max(sum(sample.loss_mask), 1))
    if per_token:
        loss = sum(sums) / sum(counts)
    else:
        loss = sum(total / count for total, count in zip(sums, counts, strict=True)) / len(samples)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]).norm()
    return float(loss.detach()), float(norm)


def one_step(config: Config, rank: int = 0, world_size: int = 1, port: int | None = None) -> list[dict[str, float]]:
    """What an evaluation before the step, the step, and an evaluation of 5 samples behind it give."""
    batch, few = (RolloutBatch(rollout_id=0, samples=samples) for samples in (SAMPLES, SAMPLES[:5]))
    with started_sft(config, rank=rank, world_size=world_size, port=port) as worker:
        dp_size, dp_rank = worker.info.dp_size, worker.info.dp_rank  # type: ignore[attr-defined]
        options = batch_options(config)
        before = worker.evaluate(make_eval_batches(batch, dp_size=dp_size, **options)[dp_rank])
        shares = make_train_batches(batch, dp_size=dp_size, global_batch_size=len(SAMPLES), **options)
        (metrics,) = worker.train(shares[dp_rank]).steps
        after = worker.evaluate(make_eval_batches(few, dp_size=dp_size, **options)[dp_rank])
    return [before, {name: metrics[name] for name in ("train/loss", "train/grad_norm")}, after]


@pytest.mark.parametrize("per_token", [True, False])
def test_loss_and_gradient_are_those_of_transformers(model_of: Callable[..., Path], per_token: bool) -> None:
    model = model_of("qwen3")
    flags = [*FLAGS, *PACKED, *(["--calculate-per-token-loss"] if per_token else [])]
    before, metrics, after = one_step(config_of(model, "--rollout-batch-size", "8", *flags))
    loss, norm = reference(model, SAMPLES, per_token)
    assert metrics["train/loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert before["train/loss"] == metrics["train/loss"]
    assert after["train/loss"] != pytest.approx(reference(model, SAMPLES[:5], per_token)[0], abs=1e-3), "it has learnt"


def one_step_in_every_layout(rank: int, world_size: int, model: Path, ports: dict[str, int]) -> dict[str, Any]:
    return {
        name: one_step(config_on_ranks(model, flags), rank, world_size, ports[name]) for name, flags in LAYOUTS.items()
    }


def config_on_ranks(model: Path, flags: list[str]) -> Config:
    return config_of(model, "--rollout-batch-size", "8", "--actor-num-gpus-per-node", "2", *FLAGS, *PACKED, *flags)


def test_data_and_context_parallel_ranks_compute_what_one_does(model_of: Callable[..., Path]) -> None:
    """Also an evaluation of 5 samples, which do not fill two data-parallel ranks."""
    model = model_of("qwen3")
    alone = one_step(config_of(model, "--rollout-batch-size", "8", *FLAGS, *PACKED))
    ports = {name: free_port() for name in LAYOUTS}
    for found in on_ranks(2, one_step_in_every_layout, model, ports):
        for layout in LAYOUTS:
            for expected, metrics in zip(alone, found[layout], strict=True):
                assert metrics == pytest.approx(expected, rel=2e-5), layout


def test_copies_that_fill_the_ranks_of_an_evaluation_count_nowhere() -> None:
    batch = RolloutBatch(rollout_id=0, samples=SAMPLES[:5])
    shares = make_eval_batches(batch, dp_size=2, micro_batch_size=2)
    assert [len(share.samples) for share in shares] == [4, 4]
    trained = [sample.index for share in shares for sample in share.samples if sample.trained_tokens]
    assert sorted(trained) == [sample.index for sample in SAMPLES[:5]]
    for share in shares:
        (step,) = share.steps
        assert (step.num_samples, step.num_tokens) == (5, sum(max(s.trained_tokens, 1) for s in SAMPLES[:5]))
