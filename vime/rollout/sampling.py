"""The sampling loop: keeps groups in flight until enough of them are kept.

Invariants:
* every group taken from the source is either returned or in ``dropped``, unless an error ends the call;
* no task outlives ``collect``, whatever ends it;
* the result is ordered by group index, so it does not depend on which answer came first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from vime.errors import UserError
from vime.ports import DataSource
from vime.types import Group

RunGroup = Callable[[Group], Awaitable[Group]]
KeepGroup = Callable[[Group], bool]


class SamplingLoop:
    """Draws groups, runs them concurrently, and keeps those that a filter lets through.

    Args:
        source: where groups come from, and where unfinished ones go back.
        run_group: generates and grades one group.
        keep: whether a finished group counts; a group that does not is replaced by a fresh one.
    """

    def __init__(self, source: DataSource, run_group: RunGroup, keep: KeepGroup = lambda group: True) -> None:
        self._source = source
        self._run_group = run_group
        self._keep = keep
        self.dropped: list[Group] = []

    async def collect(self, target: int) -> list[Group]:
        """Returns ``target`` kept groups. What one group raises ends the whole call with that exception."""
        kept: list[Group] = []
        in_flight: dict[asyncio.Task[Group], Group] = {}
        try:
            while len(kept) < target:
                self._submit(target - len(kept) - len(in_flight), in_flight)
                done, _ = await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    del in_flight[task]
                    group = task.result()
                    (kept if self._keep(group) else self.dropped).append(group)
        finally:
            await cancel_all(in_flight)
        return sorted(kept, key=group_order)

    def _submit(self, count: int, in_flight: dict[asyncio.Task[Group], Group]) -> None:
        if count <= 0:
            return
        groups = self._source.get_samples(count)
        if not groups:
            raise UserError(f"the data source gave no groups where {count} were wanted")
        for group in groups:
            in_flight[asyncio.ensure_future(self._run_group(group))] = group


def group_order(group: Group) -> int:
    """The key by which groups are ordered: the place at which their prompt was drawn."""
    index = group[0].group_index
    if index is None:
        raise ValueError("a group came back without its group_index; generate functions must keep it")
    return index


async def cancel_all(tasks: dict[asyncio.Task[Group], Group]) -> None:
    """Cancels the tasks and waits until each has really ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
