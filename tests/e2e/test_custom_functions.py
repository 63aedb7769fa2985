"""The examples of the page on custom functions, all together in one run on the real stack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.harness import Run
from vime.folder_lock import LOCK

pytestmark = pytest.mark.timeout(900)

EXAMPLES = "examples.plugins"

IN_THE_DRIVER = {
    "--data-source-path": "data_source:Additions",
    "--custom-generate-function-path": "generate:think_twice",
    "--rollout-sample-hook": "filters:mask_first_token",
    "--custom-rm-path": "rewards:exact_and_short",
    "--rollout-sample-filter-path": "filters:remove_repetitions",
    "--rollout-all-samples-process-path": "filters:keep_solved",
    "--custom-rollout-log-function-path": "logs:log_rollout",
    "--custom-convert-samples-to-train-data-path": "rewards:centred_rows",
}
ON_THE_RANKS = {
    "--custom-megatron-init-path": "training:exact_products",
    "--custom-model-provider-path": "training:without_embedding",
    "--custom-megatron-before-log-prob-hook-path": "training:note_pass",
    "--rollout-data-postprocess-path": "training:bounded_advantages",
    "--custom-megatron-before-train-step-hook-path": "training:gentle_start",
}


def with_functions(flags: list[str], functions: dict[str, str]) -> list[str]:
    words = [word for pair in functions.items() for word in (pair[0], f"{EXAMPLES}.{pair[1]}")]
    return [*flags, *words]


def test_every_example_does_what_it_says(flags: list[str], save: Path) -> None:
    words = with_functions(flags, IN_THE_DRIVER | ON_THE_RANKS)
    with Run(save, *words, "--num-rollout", "2", "--rollout-max-response-len", "24") as run:
        run.finish()
        run.assert_nothing_is_left()
    rows = [row for row in run.rows() if "train/loss" in row]
    assert [row["train/lr"] for row in rows] == pytest.approx([1.5e-3, 3e-3]), "half of it in the first rollout"
    assert all(0 <= row["rollout/names_a_number"] <= 1 and "rollout/raw_reward" in row for row in rows)
    passes = [line.split()[0] for line in (save / "passes.txt").read_text().splitlines()]
    assert passes == ["log_probs", "log_probs"]
    samples = [sample for rollout_id in range(2) for sample in run.samples(rollout_id)]
    assert len({sample["prompt"] for sample in samples}) == 8 and samples[0]["prompt"].startswith("What is ")
    assert all("opening" in sample["metadata"] for sample in samples)
    assert all("\nWait.\n" in sample["response"] or sample["status"] == "completed" for sample in samples)
    assert json.loads((save / "additions_1.json").read_text()) == {"drawn": 8}
    assert (save / "solved.jsonl").exists() and not (save / "logs" / "custom_functions.log").exists()


@pytest.mark.slow
def test_a_hook_that_fails_on_a_rank_ends_the_run_and_is_named_last(flags: list[str], save: Path) -> None:
    words = [*flags, "--custom-megatron-before-train-step-hook-path", "tests.training.train_hooks:fails"]
    with Run(save, *words, "--num-rollout", "2") as run:
        assert run.wait() == 1
        run.assert_nothing_is_left()
    last = run.output().splitlines()[-1]
    assert last.startswith(
        "error: --custom-megatron-before-train-step-hook-path tests.training.train_hooks:fails: "
        "raised RuntimeError: no budget left (train_hooks.py:"
    )
    assert last.endswith("for step 1 of rollout 1, rank 0")
    assert "no budget left" in (save / "logs" / "custom_functions.log").read_text()


@pytest.mark.slow
def test_weights_go_over_a_disk_and_a_function_sees_each_version(flags: list[str], save: Path) -> None:
    """The run itself proves that the engines compute with what the trainer has."""
    versions = save.parent / "versions"
    words = [*flags, "--update-weight-transport", "disk", "--update-weight-disk-dir", str(versions)]
    words = with_functions(words, {"--custom-update-weight-post-write-path": "weights:list_files"})
    with Run(save, *words, "--num-rollout", "2", "--weight-probe-interval", "1") as run:
        run.finish()
        run.assert_nothing_is_left()
    rows = [row for row in run.rows() if "train/loss" in row]
    assert [row["rollout/weight_version/max"] for row in rows] == [1, 2]
    last = versions / "version_0000003"
    assert {path.name for path in versions.iterdir()} == {LOCK, last.name}, "the others are gone, hidden ones too"
    written = [line.split() for line in (save / "written.txt").read_text().splitlines()]
    sizes = {path.name: path.stat().st_size for path in last.iterdir()}
    assert written == [[name, str(sizes[name])] for name in sorted(sizes)] * 3
