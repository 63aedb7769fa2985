"""A file of prompts and what a run asks of it: for who reads one, and for who only tells what a run would say of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vime.data import jsonl
from vime.data.chat import PromptEncoder
from vime.data.jsonl import Keys, PromptFile, Row
from vime.errors import UserError
from vime.rewards import registry

if TYPE_CHECKING:
    from vime.config import Config


@dataclass(frozen=True, slots=True)
class Limit:
    """How many tokens something may have, and whose word that is."""

    tokens: int
    reason: str = "--rollout-max-prompt-len"  # as messages name it


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """A file, perhaps with a slice, and what is asked of its rows."""

    spec: str
    keys: Keys
    needs_label: bool = False  # a row without a label is bad
    some_label: bool = False  # a key of labels that no row has is a mistake
    needs_text: bool = False  # a prompt that stays a list of messages is a mistake
    skip_bad_rows: bool = False
    limit: Limit | None = None  # longer prompts are dropped

    def read(self) -> PromptFile:
        """All rows.

        Raises:
            UserError: there is no such file, or not what is asked of the rows; one line for each bad row.
        """
        file = jsonl.load(self.spec, self.keys, needs_label=self.needs_label)
        if not self.skip_bad_rows:
            file.require_good()
        if self.some_label:
            file.require_labels(self.keys)
        if self.needs_text:
            file.require_texts()
        if not file.rows:
            raise UserError(f"{self.spec}: there are no rows")
        return file

    def fitting(self, rows: list[Row], encoder: PromptEncoder) -> list[Row]:
        """The rows whose prompts are not too long.

        Raises:
            UserError: the template refuses a prompt, or all are too long.
        """
        if self.limit is None:
            return rows
        lengths = _lengths(rows, encoder)
        kept = [row for row, length in zip(rows, lengths, strict=True) if length <= self.limit.tokens]
        return kept or self._refuse(len(rows), self.limit)

    def require_some_fitting(self, rows: list[Row], encoder: PromptEncoder) -> None:
        """The same without measuring more prompts than it takes to find one that is not too long."""
        if self.limit is not None and not any(length <= self.limit.tokens for length in _lengths(rows, encoder)):
            self._refuse(len(rows), self.limit)

    def _refuse(self, count: int, limit: Limit) -> list[Row]:
        raise UserError(f"{self.spec}: all {count} prompts have over {limit.tokens} tokens ({limit.reason})")


def prompt_set_of(config: Config, limit: Limit | None = None) -> PromptSet:
    """The one of ``--prompt-data``.

    Args:
        limit: of its prompts; None: ``--rollout-max-prompt-len``.

    Raises:
        UserError: there is no --prompt-data.
    """
    data, hooks, rm_type = config.data, config.hooks, config.reward.rm_type
    if data.prompt_data is None:
        raise UserError("--prompt-data: name a .jsonl file of prompts (or give --data-source-path)")
    if limit is None and data.rollout_max_prompt_len is not None:
        limit = Limit(data.rollout_max_prompt_len)
    by_rule = rm_type is not None and registry.needs_label(rm_type) and hooks.custom_rm_path is None
    own_generation = hooks.custom_generate_function_path or hooks.rollout_function_path
    return PromptSet(
        spec=data.prompt_data,
        keys=keys_of(config),
        needs_label=by_rule and not config.algorithm.is_sft,
        some_label=True,
        needs_text=config.has_engines and not data.apply_chat_template and own_generation is None,
        skip_bad_rows=data.skip_bad_rows,
        limit=limit,
    )


def keys_of(config: Config) -> Keys:
    """Where the flags say that rows hold what."""
    data = config.data
    return Keys(input=data.input_key, label=data.label_key, metadata=data.metadata_key, tools=data.tool_key)


def _lengths(rows: list[Row], encoder: PromptEncoder) -> Iterable[int]:
    return encoder.lengths((row.prompt, row.metadata) for row in rows)
