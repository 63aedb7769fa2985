"""Whole runs of a small model in which trainer and engines take turns on one GPU or on two.

Of each it is asked whether the engines have the trainer's weights: what they sampled last is compared with transformers
under the weights of that time, and every rollout with what the trainer says of it. Each run takes about as long as an
engine's start and the trainer's; a minute on GPUs is expected, none was timed there yet.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Run
from tests.gpu.demo import difference, sampled
from tests.gpu.hooks import USED
from tests.gpu.sides import KV_BYTES, ON_GPU, SIZES
from tests.tiny import make_model

pytestmark = pytest.mark.timeout(1200)  # on a CPU that others use too; each wait has a deadline of its own

ROLLOUTS, PROMPTS, ANSWERS = 3, 8, 8
LAST = ROLLOUTS - 1
ROUNDING = 0.05
"""Nats a token by which bfloat16 may differ from float32 on average."""
ENGINES = {"one engine of two": "2", "two engines of one": "1"}
STAYING = {
    "engines": ["--no-offload-rollout"],
    "trainer": ["--no-offload-train"],
    "both": ["--no-offload-rollout", "--no-offload-train"],
}
LARGE_KV_BYTES = (16 << 30) if ON_GPU else KV_BYTES


def colocated(folder: Path, *more: str) -> Run:
    """Three rollouts to their end. The last ones are sampled with weights that are saved in ``hf_1``."""
    model = make_model(folder / "model", "qwen3", tied=False, dtype="bfloat16", **SIZES)
    rows = [{"prompt": f"What is {a} + {b}?", "label": a + b} for a in range(1, 6) for b in range(1, 6)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    gpu = ["--vllm-enforce-eager", "--vllm-gpu-memory-utilization", "0.1"] if ON_GPU else []
    words = [
        *("--hf-checkpoint", str(model), "--prompt-data", str(folder / "train.jsonl"), "--apply-chat-template"),
        *("--input-key", "prompt", "--label-key", "label", "--custom-rm-path", "tests.e2e.hooks:short_words"),
        *("--rollout-sample-hook", "tests.gpu.hooks:keep_tokens", "--num-rollout", str(ROLLOUTS), "--lr", "5e-3"),
        *("--custom-megatron-before-train-step-hook-path", "tests.gpu.hooks:keep_used_memory"),
        *("--rollout-batch-size", str(PROMPTS), "--n-samples-per-prompt", str(ANSWERS)),
        *("--rollout-max-response-len", "32", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "2048"),
        *("--actor-num-gpus-per-node", "1", "--colocate", "--vllm-max-model-len", "128"),
        *("--vllm-kv-cache-memory-bytes", str(KV_BYTES), "--vllm-max-num-seqs", str(PROMPTS * ANSWERS), *gpu),
        *("--save-interval", str(LAST), "--save-hf", str(folder / "hf_{rollout_id}"), "--no-save-optim", *more),
    ]
    with Run(folder / "run", *words) as run:
        run.finish()
        run.assert_nothing_is_left()
    return run


def train_rows(run: Run) -> list[dict[str, Any]]:
    return [row for row in run.rows() if "train/loss" in row]


def assert_weights(run: Run, folder: Path) -> None:
    rows = train_rows(run)
    assert [row["rollout_id"] for row in rows] == list(range(ROLLOUTS))
    for row in rows:
        assert row["train/grad_norm"] > 0, "answers to a prompt have different rewards"
        assert row["train/train_rollout_logprob_abs_diff"] < ROUNDING
    last = sampled(run, LAST)
    assert len(last) == PROMPTS * ANSWERS
    assert difference(last, folder / f"hf_{LAST - 1}") < ROUNDING
    assert difference(last, folder / "model") > 5 * ROUNDING


def held(run: Run, name: str) -> list[float]:
    """Of those rollouts whose ledger was there in time: nobody waits for it."""
    return [row[f"memory/{name}"] for row in train_rows(run) if f"memory/{name}" in row]


def used_bytes(run: Run) -> list[int]:
    """Of the GPU, by all processes, before each step."""
    return [int(line) for line in (run.save / USED).read_text().split()]


@pytest.mark.two_gpus
@pytest.mark.parametrize("each", ENGINES.values(), ids=ENGINES)
def test_a_trainer_of_two_gpus_takes_turns_with_engines_there(each: str, tmp_path: Path) -> None:
    flags = ["--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    run = colocated(tmp_path, *flags, "--rollout-num-gpus-per-engine", each)
    logs = {log.name for log in (run.save / "logs").iterdir()}
    assert logs == {"router.log", *(f"engine_{index}.log" for index in range(2 // int(each)))}
    assert_weights(run, tmp_path)


@pytest.mark.one_gpu
@pytest.mark.parametrize("stays", STAYING.values(), ids=STAYING)
def test_either_side_may_stay_on_the_gpu_that_both_use(stays: list[str], tmp_path: Path) -> None:
    run = colocated(tmp_path, *stays)
    assert_weights(run, tmp_path)
    if ON_GPU and "--no-offload-rollout" in stays:
        assert min(used_bytes(run)) > KV_BYTES, "keys and values have their memory all the time"


@pytest.mark.one_gpu
def test_who_holds_what_is_told_and_a_sleeping_engine_holds_little(tmp_path: Path) -> None:
    run = colocated(tmp_path, "--vllm-kv-cache-memory-bytes", str(LARGE_KV_BYTES))
    assert_weights(run, tmp_path)
    kind = "device" if held(run, "device/generate") else "engine"  # a driver need not tell
    for name in ("actor/parameters", "actor/gradients", "actor/optimizer", "actor/train_peak", "actor/generate"):
        assert held(run, name)
        assert min(held(run, name)) > 0
    for phase in ("train", "generate"):
        assert held(run, f"{kind}/{phase}")
        assert min(held(run, f"{kind}/{phase}")) > 0
    if ON_GPU:
        # contexts of two processes take about 3 GiB; keys and values would take 16
        assert max(used_bytes(run)) < LARGE_KV_BYTES / 2, "or others use this GPU"
