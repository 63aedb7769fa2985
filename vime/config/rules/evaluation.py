"""Evaluation data sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from vime.config.config import Config
from vime.config.rules.base import Violation
from vime.errors import UserError


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


def readable_file(config: Config) -> Iterator[Violation]:
    if config.evaluation.eval_config is None:
        return
    from vime.config.eval_datasets import eval_datasets

    try:
        eval_datasets(config)
    except UserError as error:
        yield Violation(str(error))


RULES = (interval_needs_data, distinct_names, readable_file)
