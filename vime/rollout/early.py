"""What the start of a run would refuse of its data, told without starting anything: ``vime explain`` asks.

Rows are all read. Prompts are rendered and measured, which takes the tokenizer and most of the time, only until one
is found that fits, and not at all where nothing can be wrong with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from vime.config import Config
from vime.config.eval_datasets import eval_datasets
from vime.data import jsonl
from vime.data.dialogue import dialogue_of
from vime.data.jsonl import BadRow, Row
from vime.data.prompt_set import Limit, PromptSet, prompt_set_of
from vime.data.source import encoder_of
from vime.data.tokenizer import load_tokenizer
from vime.errors import UserError
from vime.rollout.eval_sets import eval_context, eval_dialogues, eval_prompt_set, with_tool_key
from vime.rollout.limits import context_limit, prompt_limit

__all__ = ["data_problems"]

MOST_SPECIAL_TOKENS = 8
"""That a tokenizer adds to a text."""


def data_problems(config: Config, *, flags_are_right: bool) -> list[str]:
    """One line for each mistake.

    Args:
        flags_are_right: whether prompts can be measured; else rows are read as far as that is possible.
    """
    problems: list[str] = []
    try:
        for prompts in _prompt_sets(config, flags_are_right):
            problems += _problems(config, prompts, flags_are_right)
    except UserError as error:  # of --eval-config, of the model's folder
        problems += str(error).splitlines() if flags_are_right else []
    return list(dict.fromkeys(problems))


def _prompt_sets(config: Config, flags_are_right: bool) -> Iterator[PromptSet]:
    """Those that vime reads itself."""
    is_sft, limit = config.algorithm.is_sft, None
    if config.data.prompt_data is not None and config.hooks.data_source_path is None:
        if flags_are_right and not is_sft:
            context = context_limit(config, config.rollout.rollout_max_context_len)
            limit = prompt_limit(context, config.data.rollout_max_prompt_len)
        yield prompt_set_of(config, limit)
    for dataset in eval_datasets(config):
        if is_sft:
            yield eval_dialogues(config, dataset)
        else:
            context = eval_context(config, dataset) if flags_are_right else Limit(0)
            yield eval_prompt_set(config, dataset, context)


def _problems(config: Config, prompts: PromptSet, flags_are_right: bool) -> list[str]:
    if not _is_readable(prompts.spec):
        return []  # a rule says so
    if prompts.keys.label is None and not flags_are_right:
        prompts = dataclasses.replace(prompts, needs_label=False)  # a rule asks for the key
    try:
        rows = prompts.read().rows
        if config.algorithm.is_sft:
            _require_answers(prompts.spec, rows, skip_bad_rows=prompts.skip_bad_rows)
        elif flags_are_right and (config.data.apply_chat_template or _may_be_too_long(rows[0], prompts.limit)):
            checkpoint = config.checkpoint
            tokenizer = load_tokenizer(checkpoint.hf_checkpoint, trust_remote_code=checkpoint.trust_remote_code)
            encoder = encoder_of(with_tool_key(config, prompts.keys.tools), tokenizer)
            prompts.require_some_fitting(rows, encoder)
    except UserError as error:
        return str(error).splitlines()
    return []


def _is_readable(spec: str) -> bool:
    try:
        return jsonl.split_spec(spec)[0].suffix in (".jsonl", ".json")
    except (UserError, OSError):
        return False


def _may_be_too_long(row: Row, limit: Limit | None) -> bool:
    """Whether its tokens must be counted: a text has at most as many as bytes."""
    if limit is None:
        return False
    return (
        not isinstance(row.prompt, str)
        or len(row.prompt.encode(errors="surrogatepass")) + MOST_SPECIAL_TOKENS > limit.tokens
    )


def _require_answers(spec: str, rows: list[Row], *, skip_bad_rows: bool) -> None:
    """Raises UserError with a line for each dialogue without an answer to learn."""
    bad: list[BadRow] = []
    for row in () if skip_bad_rows else rows:
        try:
            dialogue_of(row.prompt, row.label)
        except UserError as error:
            bad.append(BadRow(row.line, str(error)))
    jsonl.require_none(str(jsonl.split_spec(spec)[0]), bad, len(rows))
