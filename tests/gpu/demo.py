"""The demo's run on GPUs: SmolLM2-135M-Instruct learns sums from 1 + 1 to 9 + 9."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.work import MODEL, TASK, demo_flags
from tests.e2e.harness import ROOT, Run
from tests.gpu.hooks import TOKENS

PROMPTS = 8
PATIENCE_S = 200 if torch.cuda.is_available() else 400
PLACES = {
    "colocated": ["--colocate"],
    "separate": ["--rollout-num-gpus", "1"],
}


def demo(save: Path, place: str, *more: str, answers: int, hook: str = "keep_tokens") -> Run:
    """Of eight prompts a rollout. Skips the test where the model or the task is missing."""
    for path in (MODEL / "model.safetensors", TASK / "train.jsonl"):
        if not (ROOT / path).is_file():
            pytest.skip(f"there is no {path}; tools/fetch_smollm2.py and tools/make_arithmetic.py make them")
    words = [word for word in demo_flags() if word != "--colocate"]
    sizes = ["--rollout-batch-size", str(PROMPTS), "--n-samples-per-prompt", str(answers)]
    sizes += ["--global-batch-size", str(PROMPTS * answers), "--vllm-max-num-seqs", str(PROMPTS * answers)]
    hooks = ["--rollout-sample-hook", f"tests.gpu.hooks:{hook}"]
    gpu = ["--vllm-enforce-eager", "--vllm-gpu-memory-utilization", "0.3"] if torch.cuda.is_available() else []
    return Run(save, *words, *PLACES[place], *sizes, *hooks, *gpu, *more, patience_s=PATIENCE_S)


def group_rewards(run: Run, rollout_ids: Sequence[int]) -> list[float]:
    """The mean reward of each prompt's answers."""
    rewards: dict[tuple[int, int], list[float]] = {}
    for rollout_id in rollout_ids:
        for sample in run.samples(rollout_id):
            rewards.setdefault((rollout_id, sample["group_index"]), []).append(float(sample["reward"]))
    return [statistics.mean(each) for each in rewards.values()]


def rise(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """By how much a mean has risen, and the same in standard errors, with prompts as what was drawn."""
    risen = statistics.mean(after) - statistics.mean(before)
    error = sum(statistics.variance(each) / len(each) for each in (before, after)) ** 0.5
    return risen, risen / error


def sampled(run: Run, rollout_id: int) -> list[dict[str, Any]]:
    """What ``hooks.keep_tokens`` wrote of one rollout; the last line may still be being written."""
    whole, _, _ = (run.save / TOKENS).read_text().rpartition("\n")
    rows = [json.loads(line) for line in whole.splitlines()]
    return [row for row in rows if row["rollout_id"] == rollout_id]


def difference(rows: Sequence[dict[str, Any]], folder: Path) -> float:
    """Of the engine's log-probs from transformers' in float32 under the weights in a folder: the mean, in nats."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for row in rows:
        ids, length = torch.tensor([row["tokens"]]), row["response_length"]
        with torch.no_grad():
            log_probs = torch.log_softmax(model(ids).logits[0, -length - 1 : -1], -1)
        expected = log_probs.gather(1, ids[0, -length:, None])[:, 0]
        found.append((torch.tensor(row["log_probs"]) - expected).abs())
    return float(torch.cat(found).mean())
