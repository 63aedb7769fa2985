"""Evaluations of several sets, of a run that makes several samples of one, and of its checkpoint alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Run
from vime.types import CHILD_STRIDE

pytestmark = pytest.mark.timeout(900)

SETS = """
eval:
  defaults: {temperature: 0, max_response_len: 8, custom_generate_function_path: null}
  datasets:
    - {name: words, path: FILE, n_samples_per_eval_prompt: 2, temperature: 1.0}
    - {name: sums, path: FILE, rm_type: last_number, max_context_len: 40}
"""


def test_a_checkpoint_can_be_evaluated_by_itself(flags: list[str], tmp_path: Path) -> None:
    """The run's last evaluation and that of its checkpoint are of the same weights: they give the same, token by token.
    On the way every other sample becomes two, and trains as one."""
    held = tmp_path / "held.jsonl"
    held.write_text("".join(json.dumps({"prompt": f"What is {a} + 4?", "label": a + 4}) + "\n" for a in range(1, 5)))
    sets = tmp_path / "sets.yaml"
    sets.write_text(SETS.replace("FILE", str(held)))
    words = [*flags, "--eval-interval", "2", "--eval-config", str(sets), "--skip-eval-before-train"]
    words += ["--custom-generate-function-path", "tests.e2e.hooks:one_or_two", "--log-passrate"]
    with Run(tmp_path / "run", *words, "--num-rollout", "2") as run:
        run.finish()
        run.assert_nothing_is_left()
    trained, evaluated = rows_of(run)
    assert len(trained) == 2 and len(evaluated) == 1
    assert all(0 <= row["rollout/passrate/pass@4"] <= 1 and row["train/skipped_steps"] == 0 for row in trained)
    first = run.samples(0)
    assert len(first) == 24, "16 were drawn, and 8 of them became two"
    assert {sample.get("parent_index") for sample in first} == {None, *range(1, 16, 2)}
    assert sorted({sample["index"] // CHILD_STRIDE for sample in first}) == [0, 1]

    words.remove("--skip-eval-before-train")
    with Run(tmp_path / "alone", *words, "--num-rollout", "0", "--load", str(run.save)) as alone:
        alone.finish()
        alone.assert_nothing_is_left()
    assert not (alone.save / "latest_checkpointed_iteration.txt").exists(), "nothing was trained, so nothing is saved"
    trained, (again,) = rows_of(alone)
    assert not trained
    assert again == evaluated[0]
    assert again["eval/weight_version/min"] == again["eval/weight_version/max"] == 3, "0 trainings have version 1"
    assert {"eval/words-ci95", "eval/words-pass@2", "eval/sums", "eval/sums-ci95"} <= again.keys()
    for name, count in (("words", 8), ("sums", 4)):
        before, after = (samples_of(each, name) for each in (run, alone))
        assert len(after) == count and after == before


def rows_of(run: Run) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Of training, and the metrics of evaluations."""
    rows = run.rows()
    evaluated = [{name: row[name] for name in row if name.startswith("eval/")} for row in rows if "eval/words" in row]
    return [row for row in rows if "train/loss" in row], evaluated


def samples_of(run: Run, name: str) -> list[dict[str, Any]]:
    path = run.save / "samples" / f"eval_{name}_0000002.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]
