"""A rank of the trainer from start to stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tiny import make_model
from tests.training.harness import batch_of, config_of, make_samples, started
from vime.checkpoints import CheckpointStore
from vime.training.weights_io import hf_weights
from vime.types import TrainBatch
from vime.weights.shm import open_shared, view


def batches(count: int) -> list[TrainBatch]:
    return [batch_of(make_samples(seed=seed), rollout_id=seed) for seed in range(count)]


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def test_metrics_have_the_names_of_the_guide(model_of: Callable[..., Path]) -> None:
    model = model_of()
    with started(config_of(model, "--use-kl-loss", "--ref-load", str(model))) as worker:
        (metrics,) = worker.train(batches(1)[0]).steps
    assert set(metrics) >= {
        "train/loss",
        "train/pg_loss",
        "train/entropy_loss",
        "train/pg_clipfrac",
        "train/ppo_kl",
        "train/kl_loss",
        "train/grad_norm",
        "train/lr",
        "train/train_rollout_logprob_abs_diff",
        "train/train_rollout_logprob_abs_diff_max",
        "rollout/log_probs",
        "rollout/ref_log_probs",
        "rollout/advantages",
        "perf/actor_train_time",
        "perf/actor_train_tokens_per_s",
    }


def test_a_run_that_is_resumed_goes_on_bit_for_bit(model_of: Callable[..., Path], tmp_path: Path) -> None:
    flags = ["--lr", "1e-2", "--lr-decay-style", "cosine", "--load", str(tmp_path), "--save", str(tmp_path)]
    config = config_of(model_of(), *flags)
    with started(config) as worker:
        uninterrupted = [without_times(worker.train(batch).steps[0]) for batch in batches(2)]
        store = CheckpointStore(tmp_path)
        worker.save(store.begin(1))
        store.commit(1, {"cursor": 5})
        uninterrupted += [without_times(worker.train(batch).steps[0]) for batch in batches(4)[2:]]
    with started(config) as worker:
        info = worker.info  # type: ignore[attr-defined]
        assert info.start_rollout_id == 2
        assert info.state == {"cursor": 5}
        assert info.resumed_from == str(tmp_path / "iter_0000001")
        resumed = [without_times(worker.train(batch).steps[0]) for batch in batches(4)[2:]]
    assert resumed == uninterrupted[2:]


def test_without_a_checkpoint_to_resume_training_starts_from_the_reference(
    model_of: Callable[..., Path], tmp_path: Path
) -> None:
    other = make_model(tmp_path / "other", "llama", seed=3)
    run = str(tmp_path / "nothing")
    with started(config_of(model_of(), "--load", run, "--save", run, "--ref-load", str(other))) as worker:
        assert worker.info.start_rollout_id == 0  # type: ignore[attr-defined]
        found = dict(hf_weights(worker.chunks, worker.shape))
    from safetensors.torch import load_file

    expected = load_file(other / "model.safetensors")
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in found)


def test_weights_are_exported_into_the_same_memory_every_time(model_of: Callable[..., Path]) -> None:
    with started(config_of(model_of(), "--lr", "1e-2")) as worker:
        first = worker.export_weights()
        worker.train(batches(1)[0])
        second = worker.export_weights()
        assert first is not None
        assert second == first  # plan and place; what stands there is new
        data = open_shared(second.path, second.plan.total_bytes)
        for name, weight in hf_weights(worker.chunks, worker.shape):
            assert torch.equal(view(data, second.plan.by_name[name]), weight)
        del data


def test_the_learning_rate_follows_its_schedule(model_of: Callable[..., Path]) -> None:
    """Warm-up over two of the four steps from 0 to 1e-2, then linear to 0 at the end: 0, .5, 1, .5 of 1e-2."""
    flags = ["--lr", "1e-2", "--lr-decay-style", "linear", "--lr-warmup-iters", "2"]
    with started(config_of(model_of(), *flags)) as worker:
        rates = [worker.train(batch).steps[0]["train/lr"] for batch in batches(4)]
    assert rates == pytest.approx([0.0, 5e-3, 1e-2, 5e-3])
