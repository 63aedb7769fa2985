"""A checkpoint is one unit: what the ranks hold and what the driver holds, complete only together."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from vime.checkpoints import CRITIC, CheckpointStore
from vime.cluster.turns import Turns
from vime.files import writing


class GroupCheckpoints:
    """Implements ``ports.Checkpoints``.

    Args:
        driver_state: rollout_id → the driver's part as JSON values: data cursor, buffer, weight version, position of
            the metrics.
        hf_template: also write a Hugging Face folder there; ``{rollout_id}`` stands for the rollout.
        critic: where the critic's part goes, if there is one.
    """

    def __init__(
        self,
        store: CheckpointStore,
        trainer: Turns,
        driver_state: Callable[[int], dict[str, Any]],
        hf_template: str | None,
        critic: CriticCheckpoints | None = None,
    ) -> None:
        self._store = store
        self._trainer = trainer
        self._driver_state = driver_state
        self._hf_template = hf_template
        self._critic = critic

    async def save(self, rollout_id: int) -> Path:
        unfinished = self._store.begin(rollout_id)
        with _discarded_on_failure(self._store, rollout_id):
            await self._trainer.save(unfinished)
            of_critic = {} if self._critic is None else await self._critic.save(rollout_id, unfinished)
            complete = self._store.commit(rollout_id, self._driver_state(rollout_id) | of_critic)
        if self._hf_template is not None:
            await self._trainer.save_hf(Path(self._hf_template.replace("{rollout_id}", str(rollout_id))))
        return complete


class Saves(Protocol):
    """A model that writes itself into a folder."""

    async def save(self, directory: Path) -> None: ...


class CriticCheckpoints:
    """The critic's part of a checkpoint: a folder in it, or with ``--critic-save`` one below a root of its own.

    There it is complete before the checkpoint that names it is: a run which is killed in between resumes from the
    checkpoint before, whose critic is still there. The name is drawn anew each time, so that a critic which was saved
    again, and its actor not, is not taken for the one that belongs to the actor.
    """

    def __init__(self, critic: Saves, store: CheckpointStore | None) -> None:
        self._critic, self._store = critic, store

    async def save(self, rollout_id: int, unfinished: Path) -> dict[str, Any]:
        """Returns what the checkpoint says of it."""
        if self._store is None:
            directory = unfinished / CRITIC
            with writing(directory):
                directory.mkdir()
            await self._critic.save(directory)
            return {}
        name = uuid.uuid4().hex
        unfinished = self._store.begin(rollout_id)
        with _discarded_on_failure(self._store, rollout_id):
            await self._critic.save(unfinished)
            self._store.commit(rollout_id, {"id": name})
        return {CRITIC: {"root": str(self._store.root), "id": name}}


@contextmanager
def _discarded_on_failure(store: CheckpointStore, rollout_id: int) -> Iterator[None]:
    """Half a checkpoint is worth nothing, and its room may be just what the disk lacks."""
    try:
        yield
    except Exception:
        store.discard(rollout_id)
        raise
