"""The made-up process group over which a trainer's weights reach engines: all of its members have them, or it is gone
and somebody is to blame."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container

from vime.weights.invitation import Invitation, SendReport

LOOK_S = 0.125  # between two looks at who is there
SEND_S = 2.0


class FakeGroup:
    """A trainer and the engines that it has invited.

    Args:
        members: processes of engines; each has a rank from 1 on.
        timeout_s: of each step.
    """

    def __init__(self, members: int, timeout_s: float) -> None:
        self.invitation = Invitation(address="trainer", port=1, secret="", world_size=1 + members, timeout_s=timeout_s)
        self._ranks = range(1, 1 + members)
        self._lives: dict[int, Callable[[], bool]] = {}  # of those that have joined
        self._receivers: dict[int, asyncio.Future[int]] = {}  # the weights, for those who wait for them
        self._is_made = False
        self._gone = ""  # why

    # the engines' end

    async def join(self, rank: int, is_alive: Callable[[], bool]) -> None:
        """Raises BrokenGroup if others do not come."""
        self._lives[rank] = is_alive
        while not self._is_made:
            self._check()
            await asyncio.sleep(LOOK_S)

    async def receive(self, rank: int) -> int:
        """The weights. Raises BrokenGroup if somebody leaves before all have them."""
        self._check()
        self._receivers[rank] = asyncio.get_running_loop().create_future()
        return await self._receivers[rank]

    # the trainer's end

    async def meet(self) -> None:
        """Waits for all members. Raises BrokenGroup if one does not come in time."""
        missing = await self._missing(self._lives)
        if missing:
            self.close(f"no sign of rank {missing}")
            self._check()
        self._is_made = True

    async def send(self, weights: int) -> SendReport:
        missing = await self._missing(self._receivers)
        if not missing:
            await asyncio.sleep(SEND_S)
            missing = self._dead()
        if missing:
            self.close(f"rank {missing} is lost")
            return SendReport(sent_bytes=0, seconds=0.0, failures=dict.fromkeys(missing, "it is lost"))
        for receiver in self._receivers.values():
            receiver.set_result(weights)
        self._receivers.clear()
        return SendReport(sent_bytes=4, seconds=SEND_S)

    def close(self, why: str) -> None:
        self._gone = self._gone or why
        for receiver in self._receivers.values():
            if not receiver.done():
                receiver.set_exception(BrokenGroup(why))
        self._receivers.clear()

    async def _missing(self, present: Container[int]) -> list[int]:
        """Those who do not come in time, or who came and are dead: nobody waits for the dead."""
        clock = asyncio.get_running_loop().time
        end = clock() + self.invitation.timeout_s
        while (missing := [rank for rank in self._ranks if rank not in present]) and clock() < end:
            if dead := self._dead():
                return dead
            await asyncio.sleep(LOOK_S)
        return missing or self._dead()

    def _dead(self) -> list[int]:
        return [rank for rank, is_alive in self._lives.items() if not is_alive()]

    def _check(self) -> None:
        if self._gone:
            raise BrokenGroup(self._gone)


class BrokenGroup(RuntimeError):
    """The group is gone."""
