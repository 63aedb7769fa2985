"""Evaluation data sets."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vime.config.config import Config
from vime.config.eval_names import problems
from vime.config.rules.base import Violation
from vime.config.rules.ranges import RANGES
from vime.config.sections.reward import needs_label
from vime.errors import UserError

if TYPE_CHECKING:
    from vime.config.eval_datasets import EvalDataset


def interval_needs_data(config: Config) -> Iterator[Violation]:
    evaluation = config.evaluation
    given = evaluation.eval_prompt_data or evaluation.eval_config or config.hooks.eval_function_path
    if evaluation.eval_interval is not None and not given:
        yield Violation(
            "--eval-interval needs --eval-prompt-data NAME FILE: what to evaluate on", ("eval_prompt_data",)
        )


def distinct_names(config: Config) -> Iterator[Violation]:
    counts = Counter(name for name, _ in config.evaluation.eval_prompt_data)
    for name, count in counts.items():
        if count > 1:
            yield Violation(f"--eval-prompt-data names {name!r} {count} times; each data set needs its own name")
    for problem in problems(list(counts)):
        yield Violation(f"--eval-prompt-data: {problem}")


def sets_of_the_file(config: Config) -> Iterator[Violation]:
    evaluation = config.evaluation
    if evaluation.eval_config is None:
        return
    from vime.config.eval_datasets import eval_datasets

    try:
        sets = eval_datasets(config)[len(evaluation.eval_prompt_data) :]
    except UserError as error:
        yield Violation(str(error))
        return
    for each in sets if not config.algorithm.is_sft else ():
        for problem in (*_numbers(each), *_grading(config, each)):
            yield Violation(f"--eval-config {evaluation.eval_config}: {each.name}: {problem}")


def _numbers(dataset: EvalDataset) -> Iterator[str]:
    for name, allowed in RANGES.items():
        field = name.removeprefix("eval_")
        value = getattr(dataset, field, None) if "eval" in name else None
        if value is not None and value not in allowed:
            yield f"{field} must be {allowed}, not {value}"
    if dataset.top_k < 1 and dataset.top_k != -1:
        yield f"top_k must be at least 1, or -1 for all tokens, not {dataset.top_k}"


def _grading(config: Config, dataset: EvalDataset) -> Iterator[str]:
    grader, reward = dataset.grader, config.reward
    if grader is not None and grader.endswith("remote_rm") and reward.rm_url is None:
        yield f"rm_type {grader} needs --rm-url: the address of the reward service"
    if grader is not None and grader.endswith("ifbench") and importlib.util.find_spec("if_verifiable") is None:
        yield f'rm_type {grader} needs the package if-verifiable, which is not installed: pip install "vime[ifbench]"'
    if dataset.group_rm and dataset.custom_rm_path is None:
        yield "group_rm needs custom_rm_path: only a custom function can grade a whole group"
    if grader is not None and needs_label(grader) and dataset.label_key is None:
        yield f"rm_type {grader} compares with a label: give label_key"


RULES = (interval_needs_data, distinct_names, sets_of_the_file)
