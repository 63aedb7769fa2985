"""Custom functions, and names of parameters, that do not go together or cannot be read."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vime.config.config import Config
from vime.config.rules.base import Violation


def conversion(config: Config) -> Iterator[Violation]:
    """A custom conversion sees samples, not rewards that somebody has processed."""
    if config.hooks.custom_convert_samples_to_train_data_path is None:
        return
    unread = {
        "--custom-reward-post-process-path": config.hooks.custom_reward_post_process_path is not None,
        "--overlong-buffer-len": config.algorithm.overlong_buffer_len is not None,
        "--exclude-zero-signal-groups": config.algorithm.exclude_zero_signal_groups,
    }
    for flag, given in unread.items():
        if given:
            yield Violation(
                f"{flag} has no effect beside --custom-convert-samples-to-train-data-path, which makes the rewards "
                "that are trained on: leave one of them out"
            )


def parameter_names(config: Config) -> Iterator[Violation]:
    lists = {
        "--only-train-params-name-list": config.optimizer.only_train_params_name_list,
        "--freeze-params-name-list": config.optimizer.freeze_params_name_list,
    }
    if all(lists.values()):
        yield Violation(f"{' and '.join(lists)} exclude each other: give the shorter one")
    for flag, patterns in lists.items():
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                yield Violation(f"{flag} {pattern}: no regular expression ({error})")


RULES = (conversion, parameter_names)
