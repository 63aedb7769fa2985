"""A checkpoint is one unit: what the ranks hold and what the driver holds, complete only together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vime.checkpoints import CheckpointStore
from vime.cluster.turns import Turns


class GroupCheckpoints:
    """Implements ``ports.Checkpoints``.

    Args:
        driver_state: rollout_id → the driver's part as JSON values: data cursor, buffer, weight version, position of
            the metrics.
        hf_template: also write a Hugging Face folder there; ``{rollout_id}`` stands for the rollout.
    """

    def __init__(
        self,
        store: CheckpointStore,
        trainer: Turns,
        driver_state: Callable[[int], dict[str, Any]],
        hf_template: str | None,
    ) -> None:
        self._store = store
        self._trainer = trainer
        self._driver_state = driver_state
        self._hf_template = hf_template

    async def save(self, rollout_id: int) -> Path:
        unfinished = self._store.begin(rollout_id)
        await self._trainer.save(unfinished)
        complete = self._store.commit(rollout_id, self._driver_state(rollout_id))
        if self._hf_template is not None:
            await self._trainer.save_hf(Path(self._hf_template.replace("{rollout_id}", str(rollout_id))))
        return complete
