"""Whole runs of a mixture of experts in bfloat16 that train along the routes of their engine."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Run
from tests.e2e.test_runs import train_rows
from tests.e2e.test_sampling import state_of
from tests.tiny import make_model
from vime.data.codec import sample_from_json

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DIFFERENCE = "train/train_rollout_logprob_abs_diff"


@pytest.fixture
def experts(flags: list[str], tmp_path: Path) -> list[str]:
    """Answers of very different lengths, of which some are interrupted in every rollout."""
    words = [word for word in flags if word != "--fp32"]
    model = make_model(tmp_path / "model", "qwen3_moe", num_hidden_layers=4, num_experts=16, num_experts_per_tok=4)
    words[words.index("--hf-checkpoint") + 1] = str(model)
    words[words.index("--rollout-max-response-len") + 1] = "64"
    more = ["--bf16", "--num-steps-per-rollout", "2", "--rollout-stop-token-ids", *map(str, range(20, 40))]
    return [*words, *more, "--partial-rollout", "--over-sampling-batch-size", "6", "--vllm-server-concurrency", "20"]


def test_a_run_follows_its_engine_through_interruptions_and_a_restart(experts: list[str], tmp_path: Path) -> None:
    words = [*experts, "--use-rollout-routing-replay"]
    with Run(tmp_path / "run", *words, "--num-rollout", "2") as first:
        first.finish()
        first.assert_nothing_is_left()
    waiting = [sample_from_json(each) for each in itertools.chain(*state_of(first, 1)["source"]["buffer"])]
    begun = [sample for sample in waiting if sample.response_length]
    assert begun, "some answers wait to be gone on with"
    for sample in begun:
        assert sample.rollout_routed_experts is not None
        assert sample.rollout_routed_experts.shape == (len(sample.tokens) - 1, 3, 4)

    with Run(tmp_path / "run", *words, "--num-rollout", "3", "--load", str(first.save)) as second:
        second.finish()
        second.assert_nothing_is_left()
    rows = train_rows(second)
    assert sum(row["rollout/samples/continued"] for row in rows if "rollout/samples/continued" in row) >= 1
    assert {row["rollout/routed_tokens"] for row in rows if "rollout/routed_tokens" in row} == {1.0}

    with Run(tmp_path / "free", *experts, "--num-rollout", "1") as free:
        free.finish()
    followed, unled = first_of(rows), first_of(train_rows(free))
    print("followed", followed[DIFFERENCE], followed[f"{DIFFERENCE}_max"])
    print("free", unled[DIFFERENCE], unled[f"{DIFFERENCE}_max"])
    assert "rollout/routed_tokens" not in unled
    assert followed[DIFFERENCE] < unled[DIFFERENCE], "the weights are the same, and so is what was sampled"


def first_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return next(row for row in rows if DIFFERENCE in row)
