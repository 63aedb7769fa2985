"""Weight sync between the trainer's actors and the engines."""

from __future__ import annotations

from collections.abc import Sequence

from vime.cluster.train_group import TrainGroup
from vime.serving.control import EngineControl
from vime.types import WeightVersion
from vime.weights.probe import probe
from vime.weights.sync import sync_engines


class GroupWeightSync:
    """Implements ``ports.WeightSync``.

    Args:
        version: the version before the first sync of this process; a resumed run passes the saved one minus 1, so that
            its first sync brings back the same version of the same weights.
        probe_interval: after the first sync and every so many, prove that the weights arrived; 0: the first only.
    """

    def __init__(
        self,
        trainer: TrainGroup,
        engines: Sequence[EngineControl],
        *,
        version: WeightVersion,
        probe_interval: int,
        timeout_s: float,
        tolerance: float,
    ) -> None:
        self._trainer = trainer
        self._engines = engines
        self.version = version
        self._probe_interval = probe_interval
        self._timeout_s = timeout_s
        self._tolerance = tolerance
        self._syncs = 0

    async def sync(self) -> WeightVersion:
        export = await self._trainer.export_weights()
        await sync_engines(export, self._engines, self.version + 1, timeout_s=self._timeout_s)
        self.version += 1
        if self._probe_is_due():
            await probe(self._engines, self._trainer.log_probs_of, tolerance=self._tolerance)
        self._syncs += 1
        return self.version

    def _probe_is_due(self) -> bool:
        if self._probe_interval == 0:
            return self._syncs == 0
        return self._syncs % self._probe_interval == 0
