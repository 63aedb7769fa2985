"""Notices that a server is gone or stuck. It is restarted under ``--use-fault-tolerance``; else the run ends with its
last words instead of with a request that got no answer.

What becomes of an engine: it ends, does not generate any more, or fails a call; it is *lost*, which everybody sees in
the fleet; the router forgets it, its processes are killed, which fails its requests in flight, and another one is
started in its place; the current weights are brought to that one; the router gets it.

Only asyncio here, and time from the event loop alone.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

from vime.errors import last_line
from vime.rollout.tasks import cancel_all, together
from vime.serving.control import EngineControl
from vime.serving.fleet import Fleet, State
from vime.serving.http import EngineError

T = TypeVar("T")

MOST_RESTARTS = 5
PERIOD_S = 3600.0
"""A server that was restarted so often within this time ends the run."""

END_S = 90.0
"""For the loop to end when it is cancelled; it gives users' functions ``CANCEL_S``."""

Failures = Callable[[], Awaitable[list[str]]]
"""One line for each server that is gone."""

Restore = Callable[[EngineControl], Awaitable[bool]]
"""Brings the current weights to an engine and has the router send requests there; False if only the next sync can."""


class Processes(Protocol):
    """The engines' processes, by the engines' numbers."""

    async def start_engine(self, index: int) -> EngineControl:
        """Starts one in the place of one that was killed. Raises EngineError with its last words."""

    async def ended(self, index: int) -> str:
        """Waits until the engine ends; returns its last words."""

    async def failure(self, index: int) -> str | None:
        """Its last words, or None while it runs."""

    async def kill(self, index: int) -> None:
        """Ends all processes of the engine, whatever they do. Never raises."""


class Router(Protocol):
    """The router's process."""

    async def ended(self) -> str:
        """Waits until it ends; returns its last words."""

    async def check(self, timeout_s: float) -> None:
        """Asks it for its engines. Raises EngineError if it does not answer in time."""

    async def restart(self) -> list[str]:
        """On the same port, with the same engines, but those that it returns. Whatever runs is killed. Raises
        EngineError."""

    async def remove(self, url: str) -> None:
        """Has no more requests sent to an engine. Never raises."""


@dataclass(frozen=True, kw_only=True)
class HealthChecks:
    """When an engine is asked for a token, and the router for its engines, and how long that may take."""

    check: Callable[[EngineControl, float], Awaitable[None]]  # (engine, timeout in s) raises EngineError
    first_wait_s: float  # after the start of an engine
    interval_s: float
    timeout_s: float


class Supervisor:
    """Watches the servers of a run, and replaces those that are lost if the fleet is tolerant.

    Args:
        restore: see ``Restore``.
        room: entered for the start of an engine; waits until there are devices for it.
        say: writes a line for people.
    """

    def __init__(
        self,
        fleet: Fleet,
        processes: Processes,
        router: Router,
        restore: Restore,
        *,
        health: HealthChecks,
        room: Callable[[], AbstractAsyncContextManager[None]],
        say: Callable[[str], None],
    ) -> None:
        self._fleet = fleet
        self._processes = processes
        self._router = router
        self._restore = restore
        self._health = health
        self._room = room
        self._say = say
        self._restarts: defaultdict[str, list[float]] = defaultdict(list)  # by the server's name: when

    async def run(self) -> NoReturn:
        """Ends with an error only: EngineError, with the last words of the server that the run cannot go on without."""
        await together([self._keep_router(), *(self._keep_engine(index) for index in self._fleet.places)])
        raise AssertionError("servers are watched for ever")

    async def _keep_engine(self, index: int) -> None:
        while True:
            engine = self._fleet[index]
            reason = await self._end_of(index, engine)
            self._tolerate(f"engine {index}", reason)
            self._fleet.lose(engine, last_line(reason))
            await together([self._router.remove(engine.url), self._processes.kill(index)])
            await self._start_again(index)

    async def _start_again(self, index: int) -> None:
        while True:
            try:
                async with self._room():
                    self._fleet.started(index, await self._processes.start_engine(index))
            except EngineError as error:
                self._tolerate(f"engine {index}", str(error))
                await self._processes.kill(index)
            else:
                self._fleet.count("engine_restarts")
                self._say(f"engine {index} was restarted")
                return

    async def _keep_router(self) -> None:
        while True:
            reason = await self._end_of_router()
            self._tolerate("the router", reason)
            self._fleet.router_lost()
            try:
                refused = await self._router.restart()
            except EngineError:
                continue  # it has ended again
            for engine in self._fleet:
                if engine.url in refused:
                    self._fleet.lose(engine, f"the router, which was restarted, does not find {engine} healthy")
            self._fleet.count("router_restarts")
            self._fleet.router_back()
            self._say("the router was restarted")

    async def _end_of_router(self) -> str:
        """Waits until the router is of no more use; returns why."""
        ends = [self._router.ended()]
        if self._fleet.tolerant:
            ends.append(self._sickness_of_router())
        return await first_of(ends)

    async def _sickness_of_router(self) -> str:
        """Requests would wait in a router that hangs until their own deadline."""
        while True:
            await asyncio.sleep(self._health.interval_s)
            try:
                await self._router.check(self._health.timeout_s)
            except EngineError as error:
                return f"the health check failed: {error}"

    def _tolerate(self, name: str, reason: str) -> None:
        """Says that the server will be restarted. Raises EngineError if that is not wanted, or was done too often."""
        if not self._fleet.tolerant:
            raise EngineError(reason)
        now = asyncio.get_running_loop().time()
        recent = [when for when in self._restarts[name] if when > now - PERIOD_S]
        if len(recent) >= MOST_RESTARTS:
            raise EngineError(
                f"{reason}\n{name} was restarted {len(recent)} times within {PERIOD_S / 60:g} minutes, and is lost "
                f"again: {last_line(reason)}"
            )
        self._restarts[name] = [*recent, now]
        self._say(f"{name} is lost, and will be restarted: {last_line(reason)}")

    async def _end_of(self, index: int, engine: EngineControl) -> str:
        """Waits until the engine is of no more use; returns why, in its own last words if it has any."""
        ends = [self._processes.ended(index), self._fleet.loss_of(engine)]
        if self._fleet.tolerant:
            ends += [self._sickness(engine), self._failure_to_join(engine)]
        reason = await first_of(ends)
        return await self._processes.failure(index) or reason

    async def _failure_to_join(self, engine: EngineControl) -> str:
        """Sees to it that the engine gets the run's weights; returns only if it fails."""
        try:
            while self._fleet.state_of(engine) is State.SUSPENDED:
                if not await self._restore(engine):
                    await self._fleet.next_change()
        except EngineError as error:
            return str(error)
        return await self._fleet.loss_of(engine)

    async def _sickness(self, engine: EngineControl) -> str:
        """Asks the engine for a token now and then; returns what was wrong when there came none."""
        await asyncio.sleep(self._health.first_wait_s)
        while True:
            await asyncio.sleep(self._health.interval_s)
            if reason := await self._diagnosis(engine):
                return reason

    async def _diagnosis(self, engine: EngineControl) -> str:
        """One check; empty if all is well. It begins anew whenever the engines are paused meanwhile."""
        found: str | None = None
        while found is None:
            await self._fleet.until(lambda: not self._fleet.is_quiet)
            found = await first_of([self._ask(engine), self._hushed()])
        return found

    async def _ask(self, engine: EngineControl) -> str:
        try:
            await self._health.check(engine, self._health.timeout_s)
        except EngineError as error:
            return f"the health check failed: {error}"
        return ""

    async def _hushed(self) -> None:
        await self._fleet.until(lambda: self._fleet.is_quiet)


async def first_of(coroutines: Sequence[Coroutine[Any, Any, T]]) -> T:
    """The result of the one that ends first; the earlier one of several. The others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def supervised(work: Coroutine[Any, Any, None], watch: Coroutine[Any, Any, NoReturn], failures: Failures) -> None:
    """Runs ``work`` while ``watch`` looks after the servers.

    Raises:
        EngineError: ``watch`` gave up, and ``work`` was cancelled; or ``work`` failed of a server. Causes come last.
    """
    running = asyncio.create_task(work, name="the training loop")
    watching = asyncio.create_task(watch, name="the supervision of servers")
    try:
        done, _ = await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    except EngineError as error:
        causes = [cause for cause in await failures() if cause not in str(error)]
        raise EngineError("\n".join([str(error), *causes])) from None
    finally:
        await cancel_all([running, watching], END_S)
