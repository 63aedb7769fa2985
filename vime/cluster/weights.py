"""Weight sync between the trainer's actors and the engines, and what an engine gets that was restarted between two."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from vime.cluster.turns import Turns
from vime.config import Config
from vime.serving.control import EngineControl
from vime.serving.fleet import Fleet, State
from vime.serving.http import EngineError
from vime.types import WeightVersion
from vime.weights.probe import ProbeFailed, probe
from vime.weights.sync import SyncError, Transfer, sync_engines
from vime.weights.transfers import Broadcast, DeviceMemory, Resting, SharedMemory

if TYPE_CHECKING:
    from vime.cluster.memory import MemoryLedger
    from vime.cluster.train_group import TrainGroup
    from vime.cluster.weight_folders import WeightFolders

TOLERANCE = {"float32": 1e-2, "float16": 0.1, "bfloat16": 0.5}
"""Nats a token by which engine and trainer may differ on average, by dtype: several times what rounding gives even with
random weights, and far below what other weights give."""


class GroupWeightSync:
    """Implements ``ports.WeightSync``.

    Args:
        turns: who has the devices.
        probe_prompt: token ids of a plain question, for the proof that the weights arrived.
        ledger: notes who holds how much memory in which phase.
        note: takes metrics of the rollout that is being made: the seconds of each step.
        transport: which way the weights take, as ``chosen_transport`` says.
        folders: where they are written, if that is a disk.
        version: the version before the first sync of this process. A resumed run passes the saved one minus 1: its
            first sync brings the very weights that had the saved version.
        unscheduled: told of a new version that nobody asked for (see ``restore``), and by how many trainings its
            weights are ahead of those before.
    """

    def __init__(
        self,
        config: Config,
        trainer: TrainGroup,
        fleet: Fleet,
        turns: Turns,
        *,
        probe_prompt: Sequence[int],
        transport: str,
        ledger: MemoryLedger,
        version: WeightVersion,
        folders: WeightFolders | None = None,
        note: Callable[[Mapping[str, float]], None] = lambda metrics: None,
        unscheduled: Callable[[WeightVersion, int], None] = lambda version, trainings: None,
    ) -> None:
        self._trainer = trainer
        self._fleet = fleet
        self._turns = turns
        self._probe_prompt = probe_prompt
        self.version = version
        self._unscheduled = unscheduled
        self._ledger = ledger
        self._note = note
        self._syncs = 0
        self._asked = 0  # syncs that wait or run
        self._one_at_a_time = asyncio.Lock()
        self._timeout_s = config.engine.weight_sync_timeout_s
        self._bucket_bytes = config.engine.update_weight_buffer_size
        self._broadcast = Broadcast(trainer, bucket_bytes=self._bucket_bytes) if transport == "nccl" else None
        self._on_device = transport == "ipc"
        self._folders = folders
        self._exported: Resting | None = None  # of this version, where it stays as it is until the next sync
        self._probe_interval = config.engine.weight_probe_interval
        self._temperature = config.rollout.rollout_temperature
        self._tolerance = TOLERANCE[config.parallel.dtype_name]

    async def sync(self) -> WeightVersion:
        """Where the fleet is tolerant an engine that fails, or that the router does not take, is lost, and the others
        go on; the first sync belongs to the start of a run, and must reach all."""
        self._asked += 1
        try:
            async with self._one_at_a_time, self._turns.turn():
                return await self._carry(self.version + 1)
        finally:
            self._asked -= 1

    async def restore(self, engine: EngineControl) -> bool:
        """Brings the current version to an engine that was restarted, and has the router send requests there.

        Memory that the trainer shares, or a folder, still has it, whatever the trainer does now. Else the trainer sends
        it, unless it has trained since: then the engine waits for the next sync. Where no engine is left nobody would
        wait for that in vain: all get what the trainer has now, as a new version if it is another one.

        Returns:
            False if the engine must wait for a sync.

        Raises:
            EngineError: the engine failed.
        """
        async with self._one_at_a_time:
            if self._syncs == 0:
                return False
            if self._exported is not None and not self._turns.engines_sleep:
                return await self._restored(engine, self._exported)
            async with self._turns.turn():
                if self._asked or self._turns.engines_are_asleep:
                    return False
                if self._exported is not None:
                    return await self._restored(engine, self._exported)
                if self._broadcast is not None and self._turns.trained == 0 and not self._turns.trainer_leaves:
                    return await self._restored(engine, self._broadcast)
                if self._fleet.serving:  # among them this one, if a sync came before
                    return self._fleet.state_of(engine) is not State.SUSPENDED
                trainings = self._turns.trained
                await self._carry(self.version + (trainings > 0), unscheduled=trainings)
                return True

    async def _restored(self, engine: EngineControl, transfer: Transfer) -> bool:
        if self._fleet.state_of(engine) is State.SUSPENDED:  # no sync came before
            with self._fleet.quiet():
                await sync_engines(transfer, [engine], self.version, timeout_s=self._timeout_s)
            await self._fleet.admit(engine)
        return True

    async def _carry(self, version: WeightVersion, *, unscheduled: int = 0) -> WeightVersion:
        """Makes all engines that there are serve the trainer's weights as ``version``, which has so many trainings more
        behind it than the one before, without anybody having asked for it."""
        is_first = self._syncs == 0
        with self._fleet.quiet():
            if self._syncs:
                self._ledger.training()
            reached: list[EngineControl] = []
            while not reached:
                transfer = await self._transfer(version)
                reached = await self._send(transfer, version)
            await self._turns.to_generation()
            self.version = version
            if unscheduled:  # at once: a checkpoint that knows the version must know its trainings too
                self._unscheduled(version, unscheduled)
            self._turns.trained = 0
            if self._probe_is_due():
                await self._probe(reached)
            self._ledger.generating(self._turns.settled)  # after the probe, for which the trainer may come back
            self._syncs += 1
        if self._folders is not None:
            await self._folders.remove_old()
        await self._fleet.each(self._fleet.admit, reached, fatal=(EngineError,) if is_first else ())
        return version

    async def _transfer(self, version: WeightVersion) -> Transfer:
        """Engines and trainer have their weights, or memory for them, where it needs them; there is an engine."""
        if not self._fleet.engines:
            await self._turns.to_starts()
            await self._fleet.until(lambda: bool(self._fleet.engines))
        await self._turns.to_export()
        if self._broadcast is not None:
            await self._turns.to_weights(trainer_stays=True)
            return self._broadcast
        self._exported = None
        clock = asyncio.get_running_loop().time
        begin = clock()
        exported = await self._export(version)
        self._note({"perf/sync_time/export": clock() - begin})
        copied = isinstance(exported, DeviceMemory)
        self._exported = None if copied else exported
        await self._turns.to_weights(copied=copied)
        return exported

    async def _export(self, version: WeightVersion) -> Resting:
        if self._folders is not None:
            return await self._folders.write(self._trainer, version, self._fleet.engines)
        export = await self._trainer.export_weights(version, on_device=self._on_device)
        return DeviceMemory(export) if export.handles else SharedMemory(export, bucket_bytes=self._bucket_bytes)

    async def _send(self, transfer: Transfer, version: WeightVersion) -> list[EngineControl]:
        """The engines that have the version in the end; those that failed are lost."""
        while engines := self._fleet.engines:
            try:
                report = await sync_engines(
                    transfer,
                    engines,
                    version,
                    timeout_s=self._timeout_s,
                    asleep=self._turns.engines_are_asleep,
                )
            except SyncError as error:
                if self._syncs == 0 or not self._fleet.tolerant:
                    raise
                for engine in engines:
                    if engine.url in error.failures:
                        self._fleet.lose(engine, error.failures[engine.url])
                if not error.untouched:
                    return [engine for engine in engines if engine.url not in error.failures]
            else:
                self._note({f"perf/sync_time/{step}": seconds for step, seconds in report.steps_s.items()})
                return engines
        return []

    def _probe_is_due(self) -> bool:
        """After the first sync and every so many; with an interval of 0 after the first only."""
        interval = self._probe_interval
        return self._syncs == 0 or (interval > 0 and self._syncs % interval == 0)

    async def _probe(self, engines: Sequence[EngineControl]) -> None:
        async def compare(engine: EngineControl) -> None:
            await probe(
                [engine],
                self._trainer.log_probs_of,
                self._probe_prompt,
                tolerance=self._tolerance,
                temperature=self._temperature,
            )

        async with self._turns.comparing():
            await self._fleet.each(compare, engines, fatal=(ProbeFailed,))
