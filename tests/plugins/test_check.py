"""What ``vime check-plugin`` says of custom functions that go wrong."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from vime.cli.main import main
from vime.errors import UserError
from vime.plugins.check import Verdict, check
from vime.types import Sample

CONVERT, DATA = "custom-convert-samples-to-train-data-path", "rollout-data-postprocess-path"

WRONG = [
    ("custom-rm-path", "reward_of_text", "the reward must be a number, not '1'"),
    ("custom-rm-path", "reward_nan", "the reward must be finite, not nan"),
    ("custom-rm-path", "reward_nothing", "the reward must be a number, not None (for an empty answer"),
    (
        "custom-rm-path",
        "reward_dict",
        "the reward is a dict with ['accuracy']; name the key to train on by --reward-key",
    ),
    ("custom-rm-path", "reward_raises", "raised ZeroDivisionError: division by zero (wrong.py:"),
    ("custom-rm-path", "reward_exits", "raised SystemExit: 3 (wrong.py:"),
    ("custom-rm-path", "reward_cancels", "raised CancelledError ("),
    ("rollout-sample-filter-path", "filter_exits", "raised SystemExit: 3 (wrong.py:"),
    ("custom-rm-path", "reward_needs_metadata", "raised KeyError: 'tests'"),
    ("custom-rm-path", "reward_coroutine", "which nobody awaits: write await before the call"),
    ("custom-rm-path", "reward_forgets_await", "calls a coroutine function without await: coroutine 'fine' was never"),
    ("custom-rm-path", "reward_changes_mask", "must not change sample.loss_mask"),
    ("custom-rm-path", "reward_reads_unknown_flag", "args has no rollout_max_response_length; did you mean"),
    ("custom-rm-path", "reward_writes_args", "args is read-only: bonus cannot be set"),
    (
        "custom-rm-path --group-rm",
        "group_one_number",
        "must return a list of 5 rewards, not float 1.0 (for a group of 5)",
    ),
    ("custom-rm-path --group-rm", "group_too_few", "must return a list of 5 rewards, not 4 of them (for a group of 5)"),
    (
        "custom-generate-function-path",
        "generate_text",
        "must return the Sample or a list of Samples, not str 'the answer'",
    ),
    ("custom-generate-function-path", "generate_nothing", "returned an empty list"),
    ("custom-generate-function-path", "generate_pending", "must set sample.status"),
    ("custom-generate-function-path", "generate_short_mask", "loss_mask has 1 entries for 2 response tokens"),
    ("custom-generate-function-path", "generate_without_prompt", "returned a sample without prompt"),
    ("custom-generate-function-path", "generate_new_sample", "must keep index 0 and group_index 0, not None and None"),
    ("custom-generate-function-path", "generate_changes_label", "must not change sample.label"),
    ("rollout-function-path", "rollout_flat", "must return a list of groups, each a list of samples, not list"),
    ("rollout-function-path", "rollout_half", "returned 2 groups for --rollout-batch-size 4"),
    ("rollout-function-path", "rollout_ungraded", "returned samples without a reward"),
    ("eval-function-path", "evaluate_list", "must return a dict of data sets, not list [1.0, 0.0]"),
    ("eval-function-path", "evaluate_texts", "gave str 'yes' as samples[0] of 'gsm8k', which must be a Sample"),
    ("eval-function-path", "evaluate_step", "must not name a metric step, as what every row of metrics.jsonl has"),
    ("eval-function-path", "evaluate_one_file", "'a b' and 'a/b' would write the same files"),
    ("custom-rollout-log-function-path", "log_step", "must not name a metric step, as what every row of metrics.jsonl"),
    ("eval-function-path", "evaluate_scores", "returned no rewards for 'gsm8k'"),
    ("data-source-path", "SourceWithoutIndices", "must give every sample an index, and every group a group_index"),
    ("data-source-path", "SourceThatRepeats", "gave two samples the same index"),
    ("data-source-path", "SourceOfEndlessLength", "must say its length as a whole number, not -1"),
    ("rollout-sample-filter-path", "filter_returns", "must change its arguments in place and return nothing, not list"),
    ("rollout-sample-filter-path", "filter_changes_reward", "must change nothing but remove_sample"),
    ("rollout-sample-filter-path", "filter_breaks_on_failures", "raised TypeError: "),
    ("custom-reward-post-process-path", "process_short", "returned 10 raw rewards and 11 rewards for 11 samples"),
    ("custom-reward-post-process-path", "process_one_list", "must return two lists, (raw rewards, rewards), not list"),
    ("custom-reward-post-process-path", "process_infinite", "gave inf as rewards[0], which must be finite"),
    ("custom-reward-post-process-path", "process_by_position", "raised IndexError: "),
    ("custom-reward-post-process-path", "process_changes_samples", "must not change samples[0].reward"),
    ("custom-rollout-log-function-path", "log_divides", "raised TypeError: "),
    ("rollout-sample-hook", "hook_drops", "must return the Sample or a list of Samples, not str 'dropped'"),
    ("rollout-sample-hook", "hook_breaks_mask", "loss_mask has 1 entries for 6 response tokens"),
    (
        "dynamic-sampling-filter-path",
        "dynamic_reason_only",
        "must return True or False, or an object with keep, not str",
    ),
    ("dynamic-sampling-filter-path", "dynamic_breaks", "raised TypeError: "),
    ("buffer-filter-path", "buffer_copies", "must remove the groups that it returns from the buffer"),
    ("buffer-filter-path", "buffer_too_many", "returned 3 groups where 2 were wanted"),
    ("buffer-filter-path", "buffer_new", "returned a group that was not in the buffer"),
    (
        "rollout-all-samples-process-path",
        "all_samples_returns",
        "must change its arguments in place and return nothing",
    ),
    (CONVERT, "convert_list", "must return a dict of lists, not list"),
    (CONVERT, "convert_without_rewards", "left out rewards: a rollout needs tokens, response_lengths, rewards"),
    (CONVERT, "convert_short", "returned 11 tokens and 1 rewards: one a row"),
    (CONVERT, "convert_misspelt", "returned 'loss_mask', which nobody reads; there are tokens,"),
    (CONVERT, "convert_mask", "gave 1 values as loss_masks[0], which must have 2"),
    (CONVERT, "convert_nan", "gave nan as rewards[0], which must be finite"),
    (CONVERT, "convert_half", "returned 6 rows for 11 samples; then it must give sample_indices too"),
    (CONVERT, "convert_twice", "gave two rows the same sample index"),
    ("custom-update-weight-post-write-path", "written_moved", "must leave the weights where they are"),
    ("custom-megatron-init-path", "init_returns", "must change its arguments in place and return nothing, not int 1"),
    ("custom-model-provider-path", "provider_returns_nothing", "must return a model, not NoneType"),
    ("custom-model-provider-path", "provider_returns_another", "must return the model that build("),
    ("custom-megatron-before-log-prob-hook-path", "log_prob_needs_layers", "'list' object has no attribute 'decoder'"),
    ("custom-megatron-before-train-step-hook-path", "step_breaks_weights", "left values that are not finite"),
    (DATA, "data_expects_advantages", "raised KeyError: 'advantages'"),
    (DATA, "data_drops_advantages", "must leave advantages in rollout_data (for the last pipeline stage)"),
    (DATA, "data_short", "set rollout_log_probs[2] to the shape [3], it must be [4]"),
    (DATA, "data_nan", "set rollout_log_probs[2] to values that are not finite"),
    (DATA, "data_soft_masks", "set loss_masks[0] to values other than 0 and 1"),
    (DATA, "data_changes_tokens", "must not change rollout_data['tokens']"),
]


def verdict(flag: str, function: str, *more: str) -> Verdict:
    name, *switches = flag.split()
    (found,) = check([f"--{name}", f"tests.plugins.wrong:{function}", *switches, *more])
    return found


@pytest.mark.parametrize(("flag", "function", "message"), WRONG, ids=[row[1] for row in WRONG])
def test_what_is_wrong_is_said(flag: str, function: str, message: str) -> None:
    found = verdict(flag, function)
    assert any(message in problem for problem in found.problems), found.problems


async def two_samples(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """A copy first, then the sample itself."""
    for each in (children := [copy.deepcopy(sample), sample]):
        each.tokens, each.response_length, each.response = [1, 2, 3], 2, "x"
        each.status = Sample.Status.COMPLETED
    return children


def test_a_generate_function_may_return_several_samples_in_any_order() -> None:
    (found,) = check(["--custom-generate-function-path", f"{__name__}:two_samples"])
    assert not found.problems


def test_a_problem_of_many_cases_is_said_once() -> None:
    assert verdict("custom-rm-path", "reward_of_text").problems == (
        "the reward must be a number, not '1' (for a complete answer and 9 more cases)",
    )


def test_a_problem_of_one_case_names_it() -> None:
    (problem,) = verdict("custom-rm-path", "reward_raises").problems
    assert problem.endswith("(for an empty answer and for an empty answer of an evaluation)")


def test_the_traceback_starts_in_the_function() -> None:
    (traceback, *_) = verdict("custom-rm-path", "reward_raises").tracebacks
    assert traceback.count("File ") == 1 and "return 1 / len(sample.response)" in traceback


def test_samples_have_the_metadata_of_the_prompt_data(tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text(json.dumps({"question": "1 + 1?", "metadata": {"tests": ["a"]}}) + "\n")
    assert not verdict(
        "custom-rm-path", "reward_needs_metadata", "--prompt-data", str(data), "--input-key", "question"
    ).problems


def test_the_entries_of_the_custom_config_are_in_args(tmp_path: Path) -> None:
    file = tmp_path / "custom.yaml"
    file.write_text("bonus: 0.5\n")
    assert verdict("custom-rm-path", "reward_from_config").problems
    assert not verdict("custom-rm-path", "reward_from_config", "--custom-config-path", str(file)).problems


def test_the_command_prints_a_line_a_function_and_fails_if_one_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-plugin", "--custom-rm-path", "tests.plugins.wrong:fine"]) == 0
    assert capsys.readouterr().out == "ok    --custom-rm-path tests.plugins.wrong:fine (10 calls)\n"
    assert main(["check-plugin", "--custom-rm-path", "tests.plugins.wrong:reward_raises"]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("FAIL  --custom-rm-path tests.plugins.wrong:reward_raises: raised ZeroDivisionError")
    assert "--custom-rm-path tests.plugins.wrong:reward_raises raised:\nTraceback" in shown.err


def test_the_command_says_how_many_rows_were_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"input": "a"}\n' * 3)
    assert main(["check-plugin", "--custom-rm-path", "tests.plugins.wrong:fine", "--prompt-data", str(path)]) == 0
    assert capsys.readouterr().out.endswith(" calls, samples from 3 rows)\n")


def test_an_async_function_that_blocks_is_doubted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-plugin", "--custom-rm-path", "tests.plugins.wrong:reward_sleeps"]) == 0
    ok, doubt = capsys.readouterr().out.splitlines()
    assert ok.startswith("ok    ")
    assert doubt.startswith(
        "warn  --custom-rm-path tests.plugins.wrong:reward_sleeps: kept the event loop for up to 0."
    )
    assert check(["--custom-rm-path", "tests.plugins.wrong:reward_waits"])[0].doubts == ()


def test_findings_that_differ_by_an_address_are_one() -> None:
    (problem,) = verdict("custom-rm-path", "reward_coroutine").problems
    assert problem.startswith("returned coroutine <coroutine object fine>, which nobody awaits") and "cases" in problem


def test_a_function_for_whole_groups_is_tried_with_group_rm() -> None:
    path = "examples.plugins.rewards:best_of_group"
    assert not check(["--custom-rm-path", path, "--group-rm"])[0].problems
    assert check(["--custom-rm-path", path])[0].problems, "without the flag it gets one sample"


def test_a_function_that_breaks_its_signature_is_not_called() -> None:
    assert verdict("custom-rm-path", "process_short").problems == ("it must be an async function (async def)",)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--n-samples-per-prompt", "4"], "name a function by its flag"),
        (["--custom-rm-paht", "a:b"], "unknown flag --custom-rm-paht; did you mean --custom-rm-path?"),
    ],
)
def test_a_wrong_command_line_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        check(words)
