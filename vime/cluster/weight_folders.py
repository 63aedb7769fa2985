"""Versions of the weights on a disk, from which engines load them (--update-weight-transport disk)."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.plugins import Hook
from vime.plugins.contract import read_nothing
from vime.rollout.hooks import call_within
from vime.serving.control import EngineControl
from vime.types import WeightVersion
from vime.weights.transfers import Disk

if TYPE_CHECKING:
    from vime.cluster.train_group import TrainGroup

__all__ = ["WeightFolders"]


class WeightFolders:
    """Has each version written to a folder of its own, which is there as a whole or not at all.

    Args:
        root: the folder of all versions; trainer, driver and engines see it under this path.
        keep: whether versions stay that no engine needs any more.
        written: ``--custom-update-weight-post-write-path``, called with ``args`` before engines load a version.
        timeout_s: its deadline.
    """

    def __init__(self, root: Path, *, keep: bool, written: Hook | None, args: Any, timeout_s: float) -> None:
        self._root, self._keep = root, keep
        self._written, self._args, self._timeout_s = written, args, timeout_s
        self._folders: list[Path] = []  # of this run, the newest last

    async def write(self, trainer: TrainGroup, version: WeightVersion, engines: Sequence[EngineControl]) -> Disk:
        """Raises HookError: the custom function failed."""
        folder = self._root / f"version_{version:07d}"
        plan = await trainer.weight_plan(version)
        if folder not in self._folders:
            self._folders.append(folder)
        await trainer.save_hf(folder)
        if self._written is not None:
            await call_within(
                self._written,
                *(self._args, str(folder), [engine.url for engine in engines]),
                about=f"version {version} of the weights",
                read=read_nothing,
                limit="--weight-sync-timeout-s",
                timeout_s=self._timeout_s,
            )
        return Disk(plan, folder)

    async def remove_old(self) -> None:
        """All engines have the newest version."""
        if self._keep:
            return
        for folder in self._folders[:-1]:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        del self._folders[:-1]
