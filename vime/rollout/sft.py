"""Rollouts of --loss-type sft_loss: dialogues are read and masked, nothing is sampled."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vime.config import Config
from vime.config.eval_datasets import eval_datasets
from vime.data import jsonl
from vime.data.chat import PromptEncoder
from vime.data.dialogue import DialogueEncoder, Untrained, dialogue_of
from vime.data.jsonl import BadRow, Row
from vime.data.prompt_set import PromptSet, prompt_set_of
from vime.data.source import PromptSource, Selection
from vime.data.tokenizer import load_tokenizer
from vime.errors import UserError
from vime.naming import rollout_name
from vime.plugins import Hooks, resolve_hooks
from vime.plugins import rollout as contracts
from vime.ports import DataSource
from vime.rollout.build import rollouts_of
from vime.rollout.eval_sets import eval_dialogues
from vime.rollout.hooks import CustomSource, custom_rollout
from vime.rollout.limits import max_context_of
from vime.rollout.manager import Collect
from vime.rollout.sampling import Collected
from vime.types import Group, RolloutBatch, Sample, Status, TrainSample, WeightVersion, mean

_log = logging.getLogger(__name__)

Loss = Callable[[RolloutBatch], Awaitable[float]]
"""Samples → the mean of -log π over them, weighed as in training."""


@dataclass(frozen=True, kw_only=True)
class Dialogues:
    """Everything that is read from files before a process starts."""

    hooks: Hooks
    encoder: DialogueEncoder
    source: DataSource
    eval_sources: tuple[tuple[str, PromptSource], ...]

    def num_rollout(self, config: Config) -> int:
        """Rollouts of the whole run."""
        return rollouts_of(config, len(self.source))


def load_dialogues(config: Config) -> Dialogues:
    """Reads data sets and tokenizer, masks every dialogue once, and resolves the custom functions.

    Raises:
        UserError: a file, row, tokenizer or function cannot be used; one line each.
    """
    hooks = resolve_hooks(config)
    checkpoint, data = config.checkpoint, config.data
    tokenizer = load_tokenizer(checkpoint.hf_checkpoint, trust_remote_code=checkpoint.trust_remote_code)
    encoder = DialogueEncoder(
        tokenizer,
        mask_type=data.loss_mask_type,
        template_kwargs=data.apply_chat_template_kwargs,
        tool_key=data.tool_key,
    )
    plain = PromptEncoder(tokenizer)  # samples get the messages as they stand

    def source_of(prompts: PromptSet, *, shuffle: bool) -> PromptSource:
        select = selection(
            prompts.spec,
            encoder,
            max_context_of(config, config.rollout.rollout_max_context_len),
            skip_bad_rows=data.skip_bad_rows,
        )
        return PromptSource(
            prompts,
            encoder=plain,
            seed=data.rollout_seed,
            shuffle=shuffle,
            select=select,
        )

    own_source = hooks.get(contracts.DATA_SOURCE)
    if own_source is not None:
        source: DataSource = CustomSource(
            own_source,
            config.args,
            None if hooks.get(contracts.ROLLOUT_FUNCTION) else config.rollout.n_samples_per_prompt,
        )
    else:
        assert data.prompt_data is not None, "a rule asks for it"
        source = source_of(prompt_set_of(config), shuffle=data.rollout_shuffle)
    eval_sources = tuple(
        (each.name, source_of(eval_dialogues(config, each), shuffle=False)) for each in eval_datasets(config)
    )
    return Dialogues(hooks=hooks, encoder=encoder, source=source, eval_sources=eval_sources)


def selection(path: str, encoder: DialogueEncoder, max_tokens: int, *, skip_bad_rows: bool) -> Selection:
    """Rows → one row for each sample to be trained.

    The selection raises UserError that tells which rows cannot be masked and why, or leaves such rows out with a
    warning. Rows without a trained turn and samples of more than ``max_tokens`` tokens are left out with a warning.
    """

    def select(rows: list[Row]) -> list[Row]:
        kept: list[Row] = []
        bad: list[BadRow] = []
        masked = long = misplaced = 0
        for row in rows:
            try:
                parts = masked_parts(row, encoder)
            except Untrained:
                masked += 1
            except UserError as error:
                bad.append(BadRow(row.line, str(error)))
            else:
                fitting = [part for part, tokens in parts if tokens <= max_tokens]
                kept += fitting
                long += len(parts) - len(fitting)
                misplaced += _is_misplaced(row)
        if not skip_bad_rows:
            jsonl.require_none(path, bad, len(rows))
        _warn(path, len(bad), "rows that cannot be masked are left out")
        _warn(path, masked, "rows have no trained turn (step_loss_mask 0) and are left out")
        _warn(path, long, f"samples have over {max_tokens} tokens and are left out")
        _warn(path, misplaced, "rows ask by step_loss_mask 1 for messages that are not the assistant's: never trained")
        return kept

    return select


def masked_parts(row: Row, encoder: DialogueEncoder) -> list[tuple[Row, int]]:
    """The samples of a row, each as a row of its own, and their tokens."""
    messages = dialogue_of(row.prompt, row.label)
    return [
        (Row(row.line, part, row.label, row.metadata), len(encoder.encode(part, row.metadata).token_ids))
        for part in encoder.parts(messages, row.metadata)
    ]


def _is_misplaced(row: Row) -> bool:
    messages = row.prompt if isinstance(row.prompt, list) else []
    return any(each["role"] != "assistant" and each.get("step_loss_mask") == 1 for each in messages)


def _warn(path: str, count: int, what: str) -> None:
    if count:
        _log.warning("%s: %d %s", path, count, what)


class DialogueRollouts:
    """Implements ``ports.Rollouts``.

    Args:
        args: what a custom rollout function gets.
        loss: asks the trainer for the loss on samples.
    """

    def __init__(self, dialogues: Dialogues, *, batch_size: int, args: Any, loss: Loss) -> None:
        self._source = dialogues.source
        self._encoder = dialogues.encoder
        self._eval_sources = dialogues.eval_sources
        self._batch_size = batch_size
        self._loss = loss
        hook = dialogues.hooks.get(contracts.ROLLOUT_FUNCTION)
        self._collect: Collect = (
            custom_rollout(hook, args, self._source, generated=False, multiple=args.global_batch_size)
            if hook
            else self._read
        )

    def begin(self, rollout_id: int) -> None:
        """Dialogues are there already."""

    def synced(self, version: WeightVersion, trainings: int) -> None:
        """No weights sample dialogues."""

    async def generate(self, rollout_id: int) -> RolloutBatch:
        """The next dialogues. Samples of a custom function may have tokens and loss mask already."""
        collected = await self._collect(rollout_id)
        batch = self._batch(rollout_id, [sample for group in collected.groups for sample in group])
        return dataclasses.replace(batch, metrics=_metrics(batch.samples) | dict(collected.metrics))

    async def _read(self, rollout_id: int) -> Collected:
        groups: list[Group] = []
        while len(groups) < self._batch_size:
            wanted = self._batch_size - len(groups)
            more = self._source.get_samples(wanted)
            if not more:
                raise UserError(
                    f"{rollout_name(rollout_id)}: the data source gave no groups where {wanted} were wanted"
                )
            groups += more
        return Collected(groups=groups)

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        """The loss on each evaluation set under the weights of now."""
        metrics = {}
        for name, source in self._eval_sources:
            batch = self._batch(rollout_id, [sample for group in source.once_each() for sample in group])
            metrics[f"eval/{name}-loss"] = await self._loss(batch)
        return metrics

    def _batch(self, rollout_id: int, samples: Sequence[Sample]) -> RolloutBatch:
        return RolloutBatch(rollout_id=rollout_id, samples=tuple(map(self._masked, samples)))

    def _masked(self, sample: Sample) -> TrainSample:
        if not sample.tokens:
            dialogue = self._encoder.encode(dialogue_of(sample.prompt, sample.label), sample.metadata)
            length = dialogue.response_length
            sample.tokens, sample.response_length, sample.loss_mask = (
                dialogue.token_ids,
                length,
                dialogue.mask[-length:],
            )
        if sample.status is Status.PENDING:
            sample.status = Status.COMPLETED
        sample.validate()
        assert sample.index is not None, "the data source numbers samples"
        return TrainSample(
            index=sample.index,
            group_index=sample.group_index if sample.group_index is not None else sample.index,
            tokens=tuple(sample.tokens),
            response_length=sample.response_length,
            loss_mask=tuple(sample.loss_mask or (1,) * sample.response_length),
            rollout_log_probs=None,
            weight_versions=(),
            raw_reward=0.0,
            reward=0.0,
            metadata=sample.train_metadata,
        )


def _metrics(samples: Sequence[TrainSample]) -> dict[str, float]:
    lengths = [sample.total_length for sample in samples]
    return {
        "rollout/total_len/mean": mean(lengths),
        "rollout/total_len/max": float(max(lengths)),
        "rollout/trained_tokens": float(sum(sample.trained_tokens for sample in samples)),
    }
