"""Dynamic sampling, over-sampling and partial rollouts on the real stack, and what a checkpoint keeps of them."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Run
from tests.e2e.test_runs import pick, train_rows

pytestmark = pytest.mark.timeout(900)

LEARNED = ("train/loss", "train/pg_loss", "train/grad_norm", "rollout/log_probs", "rollout/raw_reward", "train/lr")

Record = dict[str, Any]
"""A sample as JSON."""


@pytest.fixture
def dynamic(flags: list[str]) -> list[str]:
    """Pairs of answers of very different lengths, of which one in eight teaches nothing."""
    words = list(flags)
    for name, value in (
        ("--custom-rm-path", "tests.e2e.sampling_hooks:one_of_eight_tells_nothing"),
        ("--n-samples-per-prompt", "2"),
        ("--rollout-max-response-len", "64"),
    ):
        words[words.index(name) + 1] = value
    return [
        *words,
        *("--rollout-stop-token-ids", *map(str, range(20, 40))),
        *("--over-sampling-batch-size", "8", "--vllm-server-concurrency", "10"),
        *(
            "--dynamic-sampling-filter-path",
            "vime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        ),
        *("--rollout-all-samples-process-path", "tests.e2e.sampling_hooks:note_finished"),
    ]


def test_interrupted_answers_survive_a_restart_and_every_sample_is_accounted_for(
    dynamic: list[str], tmp_path: Path
) -> None:
    partial = [*dynamic, "--partial-rollout", "--buffer-filter-path", "tests.e2e.sampling_hooks:note_buffer"]
    with Run(tmp_path / "run", *partial, "--num-rollout", "2") as first:
        first.finish()
        first.assert_nothing_is_left()
    saved = state_of(first, 1)["source"]
    waited_before = len(lines(first, "buffer.jsonl"))

    with Run(tmp_path / "run", *partial, "--num-rollout", "4", "--load", str(first.save)) as second:
        second.finish()
    restored = lines(second, "buffer.jsonl")[waited_before]
    assert saved["buffer"], "the rollout ended while others waited"
    assert restored == saved["buffer"], "tokens, log-probs, versions and rewards as they were saved"
    rows = train_rows(second)
    assert [row["rollout_id"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row["rollout/groups/trained"] == 4 and row["rollout/groups/in_flight"] == 0
    assert sum(row["rollout/groups/dropped"] for row in rows) >= 1
    assert sum(row["rollout/samples/continued"] for row in rows) >= 1

    finished = lines(second, "finished.jsonl")
    check_continuations([*lines(second, "buffer.jsonl")], finished)
    check_accounts(finished, state_of(second, 3)["source"])


def check_continuations(buffers: list[list[list[Record]]], rollouts: list[list[list[Record]]]) -> None:
    """An answer that was interrupted begins with what it had, token by token, and goes on under later weights."""
    final = {sample["index"]: sample for rollout in rollouts for group in rollout for sample in group}
    continued = 0
    for waiting in itertools.chain.from_iterable(itertools.chain.from_iterable(buffers)):
        had, sample = waiting["response_length"], final.get(waiting["index"])
        if not had or sample is None:
            continue
        length = len(waiting["tokens"])
        assert sample["tokens"][:length] == waiting["tokens"]
        assert sample["rollout_log_probs"][:had] == waiting["rollout_log_probs"]
        assert sample["weight_versions"][:had] == waiting["weight_versions"]
        assert sample["metadata"]["start_rollout_id"] < sample["rollout_id"]
        if waiting["status"] == "aborted":
            continued += 1
            assert all(version > waiting["weight_versions"][-1] for version in sample["weight_versions"][had:])
        else:
            assert sample["response"] == waiting["response"], "what was complete is not sampled again"
    assert continued >= 1


def check_accounts(rollouts: list[list[list[Record]]], source: dict[str, Any]) -> None:
    """Every sample that was ever drawn is finished in one rollout, or waits."""
    groups = [group for rollout in [*rollouts, source["buffer"]] for group in rollout]
    counts = Counter(sample["index"] for group in groups for sample in group)
    assert counts == Counter(range(source["next_index"]))


def state_of(run: Run, rollout_id: int) -> dict[str, Any]:
    path = run.save / f"iter_{rollout_id:07d}" / "vime_state.json"
    state: dict[str, Any] = json.loads(path.read_text())
    return state


def lines(run: Run, name: str) -> list[Any]:
    return [json.loads(line) for line in (run.save / name).read_text().splitlines()]


@pytest.mark.slow
def test_a_deterministic_rollout_is_the_same_after_a_restart_bit_for_bit(dynamic: list[str], tmp_path: Path) -> None:
    schedule = [*dynamic, "--deterministic-rollout", "--save-interval", "2"]
    with Run(tmp_path / "whole", *schedule, "--num-rollout", "4") as whole:
        whole.finish()
    with Run(tmp_path / "parts", *schedule, "--num-rollout", "4") as killed:
        saved = killed.save / "latest_checkpointed_iteration.txt"
        killed.wait_for(saved.exists, "the first checkpoint")
        killed.process.kill()
        killed.wait()
    with Run(tmp_path / "parts", *schedule, "--num-rollout", "4", "--load", str(killed.save)) as resumed:
        resumed.finish()
    for rollout_id in range(4):
        assert pick(resumed.samples(rollout_id)) == pick(whole.samples(rollout_id)), f"samples of rollout {rollout_id}"
    for a, b in zip(train_rows(whole), train_rows(resumed), strict=True):
        assert accounts(a) and accounts(a) == accounts(b)
        assert {name: a[name] for name in LEARNED} == {name: b[name] for name in LEARNED}


def accounts(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name.startswith("rollout/groups/")}
