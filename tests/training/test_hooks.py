"""Custom functions on a rank of the trainer, in a real Megatron model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training import train_hooks
from tests.training.harness import (
    batch_of,
    config_of,
    free_port,
    make_samples,
    make_step,
    on_ranks,
    started,
    started_critic,
    started_sft,
)
from vime.config import Config
from vime.errors import UserError
from vime.training.rollout_data import Rows
from vime.types import TrainBatch

HERE = "tests.training.train_hooks"
EXAMPLES = "examples.plugins.training"
SFT = ["--loss-type", "sft_loss", "--n-samples-per-prompt", "1", "--rollout-batch-size", "8"]

pytestmark = pytest.mark.usefixtures("nothing_seen")


@pytest.fixture
def nothing_seen() -> Iterator[None]:
    train_hooks.SEEN.clear()
    yield
    train_hooks.SEEN.clear()


def two_steps() -> TrainBatch:
    """Eight samples, packed in an order that is not theirs."""
    samples = make_samples(masked=True)
    steps = make_step(samples[:4], (2, 0), (3, 1)), make_step(samples[4:], (7, 4), (5, 6))
    return batch_of(samples, *steps, rollout_id=5)


def train(model: Path, *flags: str, batch: TrainBatch | None = None) -> tuple[dict[str, float], ...]:
    with started(config_of(model, *flags)) as worker:
        return worker.train(batch or batch_of(make_samples())).steps


def test_hooks_are_called_when_their_contract_says(model_of: Callable[..., Path]) -> None:
    model = model_of()
    words = ["--custom-megatron-init-path", f"{HERE}:init", "--num-steps-per-rollout", "2"]
    words += ["--custom-megatron-before-log-prob-hook-path", f"{HERE}:before_log_prob"]
    words += ["--custom-megatron-before-train-step-hook-path", f"{HERE}:before_step"]
    train(model, *words, "--use-kl-loss", "--ref-load", str(model), batch=two_steps())
    assert train_hooks.SEEN == [
        ("init", "actor", 1),
        ("log_prob", "ref_", 1),
        ("log_prob", "", 1),
        ("step", 5, 0),
        ("step", 5, 1),
    ]


def test_rollout_data_has_a_row_a_sample_in_the_order_of_the_batch(model_of: Callable[..., Path]) -> None:
    model, batch = model_of(), two_steps()
    words = ["--rollout-data-postprocess-path", f"{HERE}:note_data", "--num-steps-per-rollout", "2"]
    train(model, *words, "--use-kl-loss", "--ref-load", str(model), batch=batch)
    (data,) = train_hooks.SEEN
    samples = batch.samples
    assert data["sample_indices"] == [sample.index for sample in samples]
    assert [row.tolist() for row in data["tokens"]] == [list(sample.tokens) for sample in samples]
    assert [row.tolist() for row in data["loss_masks"]] == [list(sample.loss_mask) for sample in samples]
    for sample, engine, advantage in zip(samples, data["rollout_log_probs"], data["advantages"], strict=True):
        assert engine.tolist() == pytest.approx(sample.rollout_log_probs)
        assert advantage.tolist() == pytest.approx([sample.reward] * sample.response_length)
    for policy, reference in zip(data["log_probs"], data["ref_log_probs"], strict=True):
        assert torch.equal(policy, reference), "nothing was trained yet"


def test_log_probs_are_there_with_one_step_too(model_of: Callable[..., Path]) -> None:
    train(model_of(), "--rollout-data-postprocess-path", f"{HERE}:note_data")
    assert len(train_hooks.SEEN[0]["log_probs"]) == 8 and "ref_log_probs" not in train_hooks.SEEN[0]


def test_changed_advantages_are_trained_on(model_of: Callable[..., Path]) -> None:
    (plain,) = train(model_of())
    (doubled,) = train(model_of(), "--rollout-data-postprocess-path", f"{HERE}:double_advantages")
    assert doubled["rollout/advantages"] == pytest.approx(2 * plain["rollout/advantages"], rel=1e-5)
    assert doubled["train/pg_loss"] == pytest.approx(2 * plain["train/pg_loss"], rel=1e-4)


@pytest.mark.parametrize("flags", [(), ("--calculate-per-token-loss",)], ids=["per sample", "per token"])
def test_changed_masks_count_as_if_they_had_come_that_way(
    model_of: Callable[..., Path], flags: tuple[str, ...]
) -> None:
    samples = make_samples()
    first = replace(samples[0], loss_mask=(0,) * samples[0].response_length)
    (expected,) = train(model_of(), *flags, batch=batch_of((first, *samples[1:])))
    (found,) = train(model_of(), *flags, "--rollout-data-postprocess-path", f"{HERE}:mask_first_sample")
    for name in ("train/loss", "train/grad_norm", "train/entropy_loss"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name


@pytest.mark.parametrize(
    ("flag", "function", "message"),
    [
        (
            "--rollout-data-postprocess-path",
            "break_lengths",
            r"set advantages\[1\] to the shape .*, for rollout 1, rank 0",
        ),
        (
            "--custom-megatron-before-train-step-hook-path",
            "fails",
            r"raised RuntimeError: no budget left \(train_hooks.py:\d+\), traceback in .*, "
            r"for step 1 of rollout 1, rank 0",
        ),
    ],
)
def test_what_goes_wrong_names_function_and_rollout(
    model_of: Callable[..., Path], flag: str, function: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"^{flag} {HERE}:{function}: {message}$"):
        train(model_of(), flag, f"{HERE}:{function}", "--run-dir", str(tmp_path))


def test_the_step_hook_of_the_documentation_halves_the_first_learning_rates(model_of: Callable[..., Path]) -> None:
    flags = ["--lr", "4e-4", "--custom-megatron-before-train-step-hook-path", f"{EXAMPLES}:gentle_start"]
    with started(config_of(model_of(), *flags)) as worker:
        rates = [worker.train(batch_of(make_samples(), rollout_id=i)).steps[0]["train/lr"] for i in range(2)]
    assert rates == pytest.approx([2e-4, 4e-4])


def test_the_provider_of_the_documentation_leaves_the_embedding_as_it_is(model_of: Callable[..., Path]) -> None:
    flags = ["--lr", "1e-2", "--custom-model-provider-path", f"{EXAMPLES}:without_embedding"]
    with started(config_of(model_of(), *flags)) as worker:
        before = {name: value.clone() for name, value in worker.chunks[0].named_parameters()}
        worker.train(batch_of(make_samples()))
        moved = {name for name, value in worker.chunks[0].named_parameters() if not torch.equal(value, before[name])}
    assert before.keys() - moved == {name for name in before if "embedding" in name} != set()


def test_a_provider_must_return_the_model_that_was_built(model_of: Callable[..., Path]) -> None:
    with (
        pytest.raises(UserError, match=r"must return the model that build\(…\) made, not Linear"),
        started(config_of(model_of(), "--custom-model-provider-path", f"{HERE}:another_model")),
    ):
        pass


def test_rows_come_back_where_they_came_from() -> None:
    batch = two_steps()
    rows = Rows.of(batch)
    packed = [
        torch.full((sum(batch.samples[i].response_length for i in micro),), float(number))
        for number, micro in enumerate(m for step in batch.steps for m in step.micro_batches)
    ]
    for one, other in zip(rows.join(rows.split(packed)), packed, strict=True):
        assert torch.equal(one, other)
    assert [float(row[0]) for row in rows.split(packed)] == [0, 1, 0, 1, 2, 3, 3, 2]


def on_two_ranks(model: Path, batches: list[TrainBatch], *flags: str) -> list[dict[str, float]]:
    """The metrics of the last step, as each of two ranks has them."""
    config = config_of(model, "--actor-num-gpus-per-node", "2", *flags)
    return on_ranks(2, train_on_rank, config, free_port(), batches)


def train_on_rank(rank: int, world_size: int, config: Config, port: int, batches: list[TrainBatch]) -> Any:
    with started(config, rank=rank, world_size=world_size, port=port) as worker:
        return worker.train(batches[rank % len(batches)]).steps[-1]


def test_masks_that_change_on_several_ranks_change_the_denominator_of_all(model_of: Callable[..., Path]) -> None:
    """Each rank masks the first of its samples; one process gets them masked already."""
    flags = ["--calculate-per-token-loss", "--fp32"]
    samples = make_samples()
    masked = [replace(s, loss_mask=(0,) * s.response_length) if i in (0, 4) else s for i, s in enumerate(samples)]
    (expected,) = train(model_of(), *flags, batch=batch_of(masked))
    whole = make_step(samples)
    shares = [batch_of(part, replace(whole, micro_batches=((0, 1, 2, 3),))) for part in (samples[:4], samples[4:])]
    hook = ["--rollout-data-postprocess-path", f"{HERE}:mask_first_sample"]
    for found in on_two_ranks(model_of(), shares, *flags, *hook):
        for name in ("train/loss", "train/grad_norm", "train/entropy_loss"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5), name


def test_hooks_run_on_every_stage_of_a_pipeline(model_of: Callable[..., Path], tmp_path: Path) -> None:
    batch = two_steps()
    flags = ["--fp32", "--num-steps-per-rollout", "2", "--run-dir", str(tmp_path)]
    flags += ["--rollout-data-postprocess-path", f"{EXAMPLES}:bounded_advantages"]
    flags += ["--custom-megatron-before-log-prob-hook-path", f"{EXAMPLES}:note_pass"]
    *_, expected = train(model_of(), *flags, batch=batch)
    first, last = on_two_ranks(model_of(), [batch], *flags, "--pipeline-model-parallel-size", "2")
    assert first["train/loss"] == last["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-5)
    assert len((tmp_path / "passes.txt").read_text().splitlines()) == 3, "one process, then two stages"


def test_hooks_of_the_critic_are_told_so(model_of: Callable[..., Path]) -> None:
    flags = ["--advantage-estimator", "ppo", "--custom-megatron-init-path", f"{HERE}:init"]
    flags += ["--custom-megatron-before-train-step-hook-path", f"{HERE}:before_step"]
    flags += ["--custom-model-provider-path", f"{EXAMPLES}:without_embedding"]
    batch = batch_of(make_samples(), rollout_id=2)
    with started_critic(config_of(model_of(), *flags)) as critic:
        scores = critic.score(batch)
        samples = tuple(replace(sample, scores=scores[sample.index]) for sample in batch.samples)
        critic.train(replace(batch, samples=samples))
        frozen = {name for name, each in critic.chunks[0].named_parameters() if not each.requires_grad}
    assert train_hooks.SEEN == [("init", "critic", 1), ("step", 2, 0)]
    assert frozen and all("embedding" in name for name in frozen)


def test_fine_tuning_may_change_masks_but_has_no_advantages(model_of: Callable[..., Path]) -> None:
    samples = make_samples()
    first = replace(samples[0], loss_mask=(0,) * samples[0].response_length)
    losses = []
    for batch, flags in (
        (batch_of((first, *samples[1:])), ["--rollout-data-postprocess-path", f"{HERE}:note_data"]),
        (batch_of(samples), ["--rollout-data-postprocess-path", f"{HERE}:mask_first_sample"]),
    ):
        with started_sft(config_of(model_of(), "--fp32", *SFT, *flags)) as worker:
            losses.append(worker.train(batch).steps[0]["train/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert "advantages" not in train_hooks.SEEN[0] and "log_probs" not in train_hooks.SEEN[0]
