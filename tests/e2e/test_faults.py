"""Servers that are killed in the middle of sampling: the run goes on, and no sample is lost or made twice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.harness import Run
from tests.e2e.hooks import ONE_PROGRAM

GROUPS, SAMPLES = 8, 4
LENGTH = 300  # tokens of each answer: a rollout takes some seconds, in which servers can be killed
SIZES = [
    *("--rollout-batch-size", str(GROUPS), "--n-samples-per-prompt", str(SAMPLES)),
    *("--rollout-max-response-len", str(LENGTH), "--max-tokens-per-gpu", "4096", "--vllm-max-model-len", "400"),
]


def without(flags: Sequence[str], *names: str) -> list[str]:
    """Flags that have no value."""
    return [word for word in flags if word not in names]


def test_engine_router_and_grader_are_killed_while_answers_are_sampled(flags: list[str], save: Path) -> None:
    words = without(flags, "--colocate")
    path = words.index("--custom-rm-path")
    hook = "tests.e2e.hooks:rest_and_one_program"
    words[path : path + 2] = ["--rm-type", "last_number", "--rollout-sample-hook", hook]
    more = ["--rollout-num-gpus", "2", "--use-fault-tolerance", "--num-rollout", "100000", "--rm-timeout-s", "60"]
    with Run(save, *words, *SIZES, *more) as run:
        run.wait_for(lambda: len(run.rows()) >= 1, "a rollout")
        engine, router = server_of(run, "engine_0.log"), server_of(run, "router.log")
        engine.kill()
        run.wait_for(lambda: "engine 0 is lost, and will be restarted" in run.output(), "the loss of the engine")
        router.kill()
        grader = grader_at_work(run)
        grader.kill()
        grader_at_work(run, but=grader)
        run.wait_for(lambda: "engine 0 was restarted" in run.output(), "another engine")
        rows = len(run.rows())
        run.wait_for(lambda: len(run.rows()) >= rows + 2, "the rest of a rollout, and one with both engines")
        run.signal(signal.SIGINT)
        assert run.wait() == 130
        run.assert_nothing_is_left()
    assert_accounted(run)
    rows = train_rows(run)
    assert sum(row["rollout/engine_restarts"] for row in rows) == 1
    assert sum(row["rollout/router_restarts"] for row in rows) == 1
    assert sum(row["rollout/requests_repeated"] for row in rows) > 0
    (program,) = [each for each in run.samples(1) if each["index"] == ONE_PROGRAM]
    assert (program["grade"]["status"], program["grade"]["score"]) == ("scored", 1.0)


@pytest.mark.slow
def test_a_stuck_engine_is_found_by_its_health_check_and_generation_waits_for_its_restart(
    flags: list[str], save: Path
) -> None:
    """The one engine of the run, on the trainer's slot. Its API server lives, and says that it is healthy."""
    more = ["--use-fault-tolerance", "--num-rollout", "100000"]
    checks = ["--rollout-health-check-interval", "2", "--rollout-health-check-timeout", "4"]
    with Run(save, *flags, *SIZES, *more, *checks) as run:
        run.wait_for(lambda: len(run.rows()) >= 1, "a rollout")
        run.named("EngineCore")[0].send_signal(signal.SIGSTOP)
        run.wait_for(lambda: "engine 0 is lost, and will be restarted" in run.output(), "the loss of the engine")
        run.wait_for(lambda: "engine 0 was restarted" in run.output(), "another engine")
        rows = len(run.rows())
        run.wait_for(lambda: len(run.rows()) >= rows + 2, "rollouts with the new engine")
        run.signal(signal.SIGINT)
        assert run.wait() == 130
        run.assert_nothing_is_left()
    assert "generates nothing for others either" in run.output()
    assert_accounted(run)


@pytest.mark.slow
def test_a_restarted_engine_joins_the_group_over_which_weights_are_broadcast(flags: list[str], save: Path) -> None:
    """It is lost while the next rollout is sampled and this one is trained on."""
    words = without(flags, "--colocate")
    more = ["--rollout-num-gpus", "2", "--use-fault-tolerance", "--update-weight-transport", "nccl"]
    slow = ["--rollout-sample-hook", "tests.e2e.hooks:rest", "--num-rollout", "100000", "--weight-probe-interval", "1"]
    with Run(save, *words, *SIZES, *more, *slow, script="train_async.py") as run:
        run.wait_for(lambda: len(run.rows()) >= 1, "a rollout")
        server_of(run, "engine_1.log").kill()
        run.wait_for(lambda: "engine 1 was restarted" in run.output(), "another engine")
        rows = len(run.rows())
        run.wait_for(lambda: len(run.rows()) >= rows + 3, "rollouts with both engines")
        run.signal(signal.SIGINT)
        assert run.wait() == 130
        run.assert_nothing_is_left()
    assert_accounted(run, staleness=1)


@pytest.mark.slow
def test_an_engine_that_dies_in_a_sync_is_left_behind_and_the_other_gets_the_new_version(
    flags: list[str], save: Path
) -> None:
    """It is stopped while the trainer trains, so that the sync waits for it, and then killed."""
    words = without(flags, "--colocate")
    more = ["--rollout-num-gpus", "2", "--use-fault-tolerance", "--num-rollout", "100000"]
    with Run(save, *words, *SIZES, *more, "--rollout-sample-hook", "tests.e2e.hooks:rest") as run:
        run.wait_for(lambda: len(run.rows()) >= 1, "a rollout")
        server = server_of(run, "engine_1.log")
        run.wait_for((save / "samples" / "rollout_0000001.jsonl").exists, "the samples of the second rollout")
        server.send_signal(signal.SIGSTOP)
        time.sleep(4)
        assert len(run.rows()) == 1, "the sync waits"
        server.kill()
        run.wait_for(lambda: "engine 1 is lost, and will be restarted" in run.output(), "the loss of the engine")
        run.wait_for(lambda: len(run.rows()) >= 3, "rollouts with the other engine")
        run.wait_for(lambda: "engine 1 was restarted" in run.output(), "another engine")
        rows = len(run.rows())
        run.wait_for(lambda: len(run.rows()) >= rows + 3, "rollouts with both engines")
        run.signal(signal.SIGINT)
        assert run.wait() == 130
        run.assert_nothing_is_left()
    assert_accounted(run)


def assert_accounted(run: Run, staleness: int = 0) -> None:
    """Every sample of every rollout is there once, whole, graded, and of the weights that its rollout belongs to."""
    for row in train_rows(run):
        samples = run.samples(row["rollout_id"])
        assert len({(each["group_index"], each["index"]) for each in samples}) == len(samples) == GROUPS * SAMPLES
        assert all(each["response_length"] == LENGTH or each["status"] == "completed" for each in samples)
        assert all(each["grade"]["status"] in ("scored", "invalid") for each in samples), "a text may have no number"
        versions = {version for each in samples for version in each["weight_versions"]}
        assert versions <= set(range(row["rollout_id"] + 1 - staleness, row["rollout_id"] + 2))
        if staleness == 0:
            assert row["train/train_rollout_logprob_abs_diff_max"] < 1e-4, "the weights are the trainer's"


def grader_at_work(run: Run, *, but: psutil.Process | None = None) -> psutil.Process:
    """Waits for a grader that runs a program, in a sandbox that is its child."""
    found: list[psutil.Process] = []

    def look() -> bool:
        found[:] = [each for each in run.named("vime.rewards.worker") if each != but and has_children(each)]
        return bool(found)

    run.wait_for(look, "a grader that runs a program" if but is None else "another grader that runs it")
    return found[0]


def has_children(process: psutil.Process) -> bool:
    try:
        return bool(process.children())
    except psutil.NoSuchProcess:
        return False


def train_rows(run: Run) -> list[dict[str, Any]]:
    return [row for row in run.rows() if "train/loss" in row]


def server_of(run: Run, log: str) -> psutil.Process:
    """The process that a guard started which writes this log."""
    guards = {each.pid for each in run.named("guard.py")}
    return next(each for each in run.named("") if parent_of(each) in guards and log in output_of(each))


def parent_of(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return None


def output_of(process: psutil.Process) -> str:
    """The file that its standard output goes to."""
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1")
    except OSError:
        return ""
