"""Whole rollouts in files (``--save-debug-rollout-data``), to look at or to train on again (``--load-debug-…``).

One line a group: a JSON list of its samples with all their fields, as ``data.codec`` writes them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from vime.config import Config
from vime.data.codec import sample_from_json, sample_to_json
from vime.errors import UserError
from vime.files import reading, write_whole, writing
from vime.types import Group, RolloutBatch, WeightVersion

__all__ = ["NoPrompts", "SavedRollouts", "load_groups", "path_of", "save_groups", "save_if_possible"]

logger = logging.getLogger(__name__)


def path_of(template: str, rollout_id: int) -> Path:
    return Path(template.replace("{rollout_id}", str(rollout_id)))


def save_groups(template: str, rollout_id: int, groups: Sequence[Group]) -> None:
    """Writes the file of one rollout, whole or not at all.

    Raises:
        UserError: the file cannot be written, or a sample holds what JSON cannot.
    """
    path = path_of(template, rollout_id)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps([sample_to_json(sample) for sample in group]) + "\n" for group in groups))


def save_if_possible(template: str, rollout_id: int, groups: Sequence[Group]) -> None:
    """The same for runs, which go on without the file: a warning says why."""
    try:
        save_groups(template, rollout_id, groups)
    except UserError as error:
        logger.warning("--save-debug-rollout-data: %s is not written: %s", path_of(template, rollout_id), error)


def load_groups(template: str, rollout_id: int) -> list[Group]:
    """The groups of one rollout, in the order in which they were saved.

    Raises:
        UserError: the file cannot be read, or a line of it is no group.
    """
    path = path_of(template, rollout_id)
    with reading(path):
        lines = path.read_bytes().splitlines()
    return [_group(f"{path}:{number}", line) for number, line in enumerate(lines, 1)]


def _group(where: str, line: bytes) -> Group:
    try:
        return [sample_from_json(record) for record in json.loads(line)]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{where}: no group of samples as --save-debug-rollout-data writes it ({error!r})") from None


class NoPrompts:
    """Implements ``ports.DataSource`` where nothing is drawn; it keeps nothing in checkpoints."""

    def get_samples(self, n: int) -> list[Group]:
        raise AssertionError("saved rollouts need no prompts")

    def add_samples(self, groups: list[Group]) -> None:
        raise AssertionError("saved rollouts return no groups")

    def __len__(self) -> int:
        return 0


class SavedRollouts:
    """Implements ``ports.Rollouts`` with what another run sampled.

    Args:
        template: path of the files.
        make_batch: rollout_id, groups → the batch, as in the run that saved them.
        metrics: of the groups.
    """

    def __init__(
        self,
        template: str,
        make_batch: Callable[[int, Sequence[Group]], RolloutBatch],
        metrics: Callable[[Sequence[Group]], dict[str, float]],
    ) -> None:
        self._template = template
        self._make_batch = make_batch
        self._metrics = metrics

    def num_rollout(self, config: Config) -> int:
        """Rollouts of the whole run."""
        assert config.rollout.num_rollout is not None, "a rule asks for it"
        return config.rollout.num_rollout

    def begin(self, rollout_id: int) -> None:
        """They are there already."""

    def synced(self, version: WeightVersion, trainings: int) -> None:
        """No weights sample them."""

    async def generate(self, rollout_id: int) -> RolloutBatch:
        return await asyncio.to_thread(self._read, rollout_id)

    def _read(self, rollout_id: int) -> RolloutBatch:
        groups = load_groups(self._template, rollout_id)
        metrics = self._metrics(groups)
        batch = self._make_batch(rollout_id, groups)
        return dataclasses.replace(batch, metrics=metrics | batch.metrics)

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        raise AssertionError("no engine answers")
