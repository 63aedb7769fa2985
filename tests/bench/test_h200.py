"""The table of what is measured on H200s, from results that were."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.h200.__main__ import PARTS, table
from bench.h200.rollout import ratios
from bench.runner import run_command

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def kept(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def test_the_table_tells_what_was_measured() -> None:
    train, full = kept("h200_train_step.json")["results"]
    results = {"train": train, "train_full": full, "sync": kept("h200_sync.json"), "layouts": kept("h200_layouts.json")}
    lines = table(results)
    assert [line.split()[-2:] for line in lines[:4]] == [
        ["51.3", "%"],
        ["115.1", "GiB"],
        ["42.3", "%"],
        ["77.9", "GiB"],
    ]
    assert lines[4].endswith("0.429 s (floor 0.021 s)")
    assert lines[5].endswith("0 of 49")


def test_a_part_that_failed_or_changed_is_told_in_its_place() -> None:
    lines = table({"sync": {"error": "not finished within 300 s\nlog"}, "colocated": {"rollouts": []}})
    assert lines[0].endswith("failed: not finished within 300 s")
    assert all("not told by its result" in line for line in lines[1:])


def test_every_part_is_a_module() -> None:
    folder = RESULTS.parent / "h200"
    assert all((folder / f"{part.words[0]}.py").is_file() for part in PARTS.values())


def test_the_objects_that_a_command_prints_are_taken_together(tmp_path: Path) -> None:
    command = [sys.executable, "-c", 'print(\'{"a": 1}\\n{\\n "b": 2}\')']
    assert run_command(command, tmp_path / "log", 30) == {"a": 1, "b": 2}


def test_a_ratio_needs_both_sides() -> None:
    http = {"tokens_per_s": {"256": [90, 92, 94]}}
    assert ratios({"http_1": http}) == {"http_1": {}}
    assert ratios({"http_1": http, "offline": {"tokens_per_s": {"256": [100]}}}) == {"http_1": {"256": 0.92}}
    assert ratios({"http_1": {"error": "not finished"}, "offline": {"error": "not finished"}}) == {"http_1": {}}


def test_a_command_that_prints_no_object_has_no_result(tmp_path: Path) -> None:
    for printed in ("", "done"):
        result = run_command([sys.executable, "-c", f"print({printed!r})"], tmp_path / "log", 30)
        assert result["error"].startswith("what it printed is no result")
