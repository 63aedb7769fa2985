"""Weight sync between the trainer's actors and the engines."""

from __future__ import annotations

from collections.abc import Sequence

from vime.cluster.memory import MemoryLedger
from vime.cluster.train_group import TrainGroup
from vime.cluster.turns import Turns
from vime.config import Config
from vime.serving.control import EngineControl
from vime.types import WeightVersion
from vime.weights.probe import probe
from vime.weights.sync import Transfer, sync_engines
from vime.weights.transfers import Broadcast, SharedMemory

TOLERANCE = {"float32": 1e-2, "float16": 0.1, "bfloat16": 0.5}
"""Nats a token by which engine and trainer may differ on average, by dtype: several times what rounding gives even with
random weights, and far below what other weights give."""


class GroupWeightSync:
    """Implements ``ports.WeightSync``.

    Args:
        turns: who has the devices.
        probe_prompt: token ids of a plain question, for the proof that the weights arrived.
        ledger: notes who holds how much memory in which phase.
        broadcasts: whether the weights go over a process group instead of through shared memory.
        version: the version before the first sync of this process. A resumed run passes the saved one minus 1: its
            first sync brings the very weights that had the saved version.
    """

    def __init__(
        self,
        config: Config,
        trainer: TrainGroup,
        engines: Sequence[EngineControl],
        turns: Turns,
        *,
        probe_prompt: Sequence[int],
        broadcasts: bool,
        ledger: MemoryLedger,
        version: WeightVersion,
    ) -> None:
        self._trainer = trainer
        self._engines = engines
        self._turns = turns
        self._probe_prompt = probe_prompt
        self.version = version
        self._ledger = ledger
        self._syncs = 0
        self._timeout_s = config.engine.weight_sync_timeout_s
        self._bucket_bytes = config.engine.update_weight_buffer_size
        self._broadcast = Broadcast(trainer, bucket_bytes=self._bucket_bytes) if broadcasts else None
        self._probe_interval = config.engine.weight_probe_interval
        self._temperature = config.rollout.rollout_temperature
        self._tolerance = TOLERANCE[config.parallel.dtype_name]

    async def sync(self) -> WeightVersion:
        if self._syncs:
            self._ledger.training()
        await self._turns.to_export()
        transfer = await self._transfer()
        await sync_engines(transfer, self._engines, self.version + 1, timeout_s=self._timeout_s)
        await self._turns.to_generation()
        self._ledger.generating()
        self.version += 1
        if self._probe_is_due():
            async with self._turns.comparing():
                await probe(
                    self._engines,
                    self._trainer.log_probs_of,
                    self._probe_prompt,
                    tolerance=self._tolerance,
                    temperature=self._temperature,
                )
        self._syncs += 1
        return self.version

    async def _transfer(self) -> Transfer:
        """Engines and trainer have their weights, or memory for them, where it needs them."""
        if self._broadcast is not None:
            await self._turns.to_weights(trainer_stays=True)
            return self._broadcast
        export = await self._trainer.export_weights()
        await self._turns.to_weights()
        return SharedMemory(export, bucket_bytes=self._bucket_bytes)

    def _probe_is_due(self) -> bool:
        """After the first sync and every so many; with an interval of 0 after the first only."""
        interval = self._probe_interval
        return self._syncs == 0 or (interval > 0 and self._syncs % interval == 0)
