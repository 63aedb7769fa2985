"""The table of what is measured on H200s, from results that were."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.h200 import colocated
from bench.h200.__main__ import PARTS, lines, measured, table
from bench.h200.rollout import ratios
from bench.runner import run_command

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def kept(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def test_the_table_tells_what_was_measured() -> None:
    train, _, full = kept("h200_train_step.json")["results"]
    results = {"train": train, "train_full": full, "sync": kept("h200_sync.json"), "layouts": kept("h200_layouts.json")}
    rows = [(row["target"], row["measured"], row["reached"]) for row in lines(results)]
    assert rows == [
        (">= 50 %", "51.3 %", True),
        ("", "115.1 GiB", None),
        (">= 42 %", "42.43 %", True),
        ("<= 78 GiB", "77.3 GiB", True),
        ("<= 0.3 s", "0.429 s", False),
        ("", "0.0208 s", None),
        ("<= 0", "0", True),
    ]
    assert table(lines(results))[4].endswith("0.429 s          NOT reached")


def test_the_newest_of_several_kept_runs_is_told_alike() -> None:
    parts = ("grpo_step", "loss_memory", "difference", "colocated")
    found = lines({part: kept(f"h200_{part}.json")["runs"][0] for part in parts})
    assert [(row["target"], row["measured"], row["reached"]) for row in found] == [
        ("<= 3 %", "1.78 %", True),
        ("<= 2 GiB", "1.578 GiB", True),
        ("<= 0.04438 nats", "0.03628 nats", True),
        ("<= 0.008 nats", "0.00462 nats", True),
        ("<= 5 %", "7.475 %", False),
        ("<= 0.6 s", "0.5696 s", True),
    ]


def test_a_target_may_be_told_by_the_result_itself() -> None:
    precisions = {"bf16": {"trainer_engine": 0.038, "floor": 0.03}, "fp16": {"trainer_engine": 0.009}}
    bf16, fp16 = lines({"difference": {"precisions": precisions}})
    assert (bf16["target"], bf16["measured"], bf16["reached"]) == ("<= 0.039 nats", "0.038 nats", True)
    assert (fp16["target"], fp16["measured"], fp16["reached"]) == ("<= 0.008 nats", "0.009 nats", False)


def test_a_part_that_failed_or_changed_is_told_in_its_place() -> None:
    rows = lines({"sync": {"error": "not finished within 300 s\nlog"}, "colocated": {"rollouts": []}})
    assert [row["reached"] for row in rows] == [None] * 4
    assert rows[0]["measured"] == "failed: not finished within 300 s"
    assert all("not told by its result" in row["measured"] for row in rows[2:])


def test_what_cannot_be_measured_here_says_why(tmp_path: Path) -> None:
    assert measured("separate", 1, tmp_path) == {"not_measured": "it needs 2 GPUs, there are 1"}
    assert measured("train", 0, tmp_path) == {"not_measured": "it needs 1 GPU, there are 0"}
    part = dataclasses.replace(PARTS["difference"], files=(tmp_path / "model.safetensors",))
    assert part.obstacle(1) == f"there is no {tmp_path}/model.safetensors"
    assert [row["measured"] for row in lines({"train": {"not_measured": "there is no GPU"}})] == [
        "not measured: there is no GPU"
    ] * 2


def test_every_part_is_a_module() -> None:
    folder = RESULTS.parent / "h200"
    assert all((folder / f"{part.words[0]}.py").is_file() for part in PARTS.values())


def test_the_objects_that_a_command_prints_are_taken_together(tmp_path: Path) -> None:
    command = [sys.executable, "-c", 'print(\'{"a": 1}\\n{\\n "b": 2}\')']
    assert run_command(command, tmp_path / "log", 30) == {"a": 1, "b": 2}


def test_the_steps_of_the_table_are_those_that_were_kept() -> None:
    words = ["python", "-m", f"bench.h200.{PARTS['colocated'].words[0]}", *PARTS["colocated"].words[1:]]
    assert kept("h200_colocated.json")["runs"][0]["command"] == " ".join(words)


@pytest.mark.parametrize(("end", "error"), [("exit 3", "ended with status 3"), ("sleep 600", "not finished within")])
def test_a_command_that_is_cut_leaves_what_it_told(end: str, error: str, tmp_path: Path) -> None:
    told = """echo '{"rollouts": [1]}'; echo '{"rollouts": [1, 2]}'; printf '{"rollo'; """
    result = run_command(["sh", "-c", told + end], tmp_path / "log", 10)
    assert result["error"].startswith(error)
    assert result["printed"] == {"rollouts": [1, 2]}


def test_rollouts_are_told_of_before_their_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is a program that only sleeps, and its record is there already."""
    monkeypatch.setattr(colocated, "POLL_S", 0.05)
    (tmp_path / "metrics.jsonl").write_text('{"perf/step_time": 4.0, "perf/actor_train_time": 3.0}\n{"perf/step_')
    known: list[int] = []
    child = subprocess.Popen(["sleep", "600"])
    status = colocated.follow(child, tmp_path, 2.0, lambda: known.append(len(colocated.rollouts_of(tmp_path))))
    assert known == [1]
    assert status == "ended after 2 s"
    assert child.poll() is not None
    assert colocated.rollouts_of(tmp_path)[0]["share_outside"] == 0.25


def test_the_end_of_a_run_is_its_status(tmp_path: Path) -> None:
    assert colocated.follow(subprocess.Popen(["false"]), tmp_path, 60.0, lambda: None) == 1


def test_a_ratio_needs_both_sides() -> None:
    http = {"tokens_per_s": {"256": [90, 92, 94]}}
    assert ratios({"http_1": http}) == {"http_1": {}}
    assert ratios({"http_1": http, "offline": {"tokens_per_s": {"256": [100]}}}) == {"http_1": {"256": 0.92}}
    assert ratios({"http_1": {"error": "not finished"}, "offline": {"error": "not finished"}}) == {"http_1": {}}


def test_a_command_that_prints_no_object_has_no_result(tmp_path: Path) -> None:
    for printed in ("", "done"):
        result = run_command([sys.executable, "-c", f"print({printed!r})"], tmp_path / "log", 30)
        assert result["error"].startswith("what it printed is no result")
