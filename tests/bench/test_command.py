"""What `python -m bench` takes and what it prints."""

from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import failed, parse, run_all
from bench.measures import MEASURES, Entry

KEYS = ["rollout_ratio", "train_ratio", "layout_ratio", "grpo_step_vs_trl", "sync_s", "overhead_share"]
KEYS += ["async_ratio", "swap_wait_ratio", "convert_ratio"]


def test_everything_is_measured_unless_told_otherwise() -> None:
    assert [entry.name for entry in parse([]).only] == KEYS


def test_only_selects_in_our_order() -> None:
    assert [entry.name for entry in parse(["--only", "sync_s,train_ratio"]).only] == ["train_ratio", "sync_s"]


def test_an_unknown_measure_is_named_together_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--only", "speed"])
    message = capsys.readouterr().err
    assert "'speed' is not a measure" in message
    assert all(key in message for key in KEYS)


def test_the_deadlines_of_all_measures_leave_room_for_a_slow_machine() -> None:
    assert all(60 <= entry.timeout_s <= 600 for entry in MEASURES)


def fake_run(entry: Entry, folder: Path) -> dict[str, Any]:
    return {"error": "no engine"} if entry.name == "sync_s" else {"value": 0.5, "unit": "ratio"}


def test_keys_hold_numbers_and_details_hold_the_rest(tmp_path: Path) -> None:
    found = run_all(parse(["--only", "train_ratio"]).only, tmp_path, fake_run)
    assert found["train_ratio"] == 0.5
    assert found["details"]["train_ratio"]["unit"] == "ratio"
    assert found["details"]["train_ratio"]["target"] == ">= 1.1"
    assert not failed(found)


def test_a_failed_measure_says_why_and_the_others_still_run(tmp_path: Path) -> None:
    found = run_all(parse(["--only", "sync_s,overhead_share"]).only, tmp_path, fake_run)
    assert found["sync_s"] == {"error": "no engine"}
    assert found["overhead_share"] == 0.5
    assert failed(found)
