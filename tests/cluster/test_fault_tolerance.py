"""What becomes of servers that end or hang, on a virtual clock. Processes, router and weights are fakes that write down
what is asked of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import Any, TypeVar

import pytest

from tests.simulation.clock import VirtualLoop
from vime.cluster.supervision import MOST_RESTARTS, PERIOD_S, HealthChecks, Supervisor
from vime.serving.control import EngineControl
from vime.serving.fleet import Fleet, State
from vime.serving.http import EngineError

T = TypeVar("T")

START_S = 60.0


class World:
    """Everything that a supervisor looks after. ``events``: what happened, with the time."""

    def __init__(self, engines: int = 2, *, tolerant: bool = True) -> None:
        self.events: list[tuple[float, str]] = []
        self.members: set[str] = set()
        self.fleet = Fleet(self, tolerant=tolerant)
        self.words: dict[int, asyncio.Future[str]] = {}
        self.router_words: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.router_is_stuck = False
        self.refused: list[str] = []
        self.starts = 0
        self.fails_to_start = ""
        self.fails_to_restore = ""
        self.can_restore = True
        self.stuck: set[int] = set()
        self.said: list[str] = []
        for index in range(engines):
            self.fleet.started(index, self._new_engine(index))

    async def serving(self) -> World:
        for engine in self.fleet.engines:
            await self.fleet.admit(engine)
        self.events.clear()
        return self

    def note(self, event: str) -> None:
        self.events.append((asyncio.get_running_loop().time(), event))

    def names(self) -> list[str]:
        return [event for _, event in self.events]

    def _new_engine(self, index: int) -> EngineControl:
        self.words[index] = asyncio.get_running_loop().create_future()
        self.stuck.discard(index)
        self.starts += 1
        return EngineControl(f"http://engine-{index}:{self.starts}", f"engine {index}")

    def end(self, index: int, words: str = "out of memory") -> None:
        self.words[index].set_result(f"The end of the log:\nengine {index} ended with status 1: {words}")

    def supervisor(self) -> Supervisor:
        checks = HealthChecks(check=self.check, first_wait_s=100, interval_s=30, timeout_s=10)
        return Supervisor(
            self.fleet, self, Router(self), self.restore, health=checks, room=nullcontext, say=self.said.append
        )

    async def start_engine(self, index: int) -> EngineControl:
        self.note(f"start {index}")
        await asyncio.sleep(START_S)
        if self.fails_to_start:
            raise EngineError(self.fails_to_start)
        return self._new_engine(index)

    async def ended(self, index: int) -> str:
        return await asyncio.shield(self.words[index])

    async def failure(self, index: int) -> str | None:
        words = self.words[index]
        return words.result() if words.done() else None

    async def kill(self, index: int) -> None:
        self.note(f"kill {index}")

    async def add(self, url: str) -> None:
        self.note(f"add {url}")
        self.members.add(url)

    async def restore(self, engine: EngineControl) -> bool:
        if self.fleet.state_of(engine) is not State.SUSPENDED:
            return True
        self.note(f"restore {engine.url}")
        if self.fails_to_restore:
            raise EngineError(self.fails_to_restore)
        if self.can_restore:
            await self.fleet.admit(engine)
        return self.can_restore

    async def check(self, engine: EngineControl, timeout_s: float) -> None:
        self.note(f"check {engine}")
        index = next(i for i in self.fleet.places if self.fleet[i] is engine)
        if index in self.stuck:
            await asyncio.sleep(timeout_s)
            raise EngineError(f"{engine} did not answer within {timeout_s:g} s")


class Router:
    def __init__(self, world: World) -> None:
        self._world = world

    async def ended(self) -> str:
        return await asyncio.shield(self._world.router_words)

    async def check(self, timeout_s: float) -> None:
        if self._world.router_is_stuck:
            await asyncio.sleep(timeout_s)
            raise EngineError(f"the router did not answer within {timeout_s:g} s")

    async def restart(self) -> list[str]:
        self._world.note("restart router")
        self._world.router_is_stuck = False
        self._world.router_words = asyncio.get_running_loop().create_future()
        await asyncio.sleep(1)
        return self._world.refused

    async def remove(self, url: str) -> None:
        self._world.note(f"remove {url}")
        self._world.members.discard(url)


def virtually(scenario: Callable[[], Coroutine[Any, Any, T]]) -> T:
    loop = VirtualLoop(0, ends_after=10 * PERIOD_S, most_steps=100_000)
    try:
        return loop.run_until_complete(scenario())
    finally:
        loop.close()


async def watched(world: World, *steps: tuple[float, Callable[[], object]]) -> None:
    """Runs the supervisor, and each step at its time; the last time is the end."""
    watch = asyncio.ensure_future(world.supervisor().run())
    begin = asyncio.get_running_loop().time()
    try:
        for when, act in steps:
            done, _ = await asyncio.wait([watch], timeout=begin + when - asyncio.get_running_loop().time())
            if done:
                watch.result()
            act()
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


def nothing() -> None: ...


def test_a_dead_engine_is_replaced_and_serves_only_after_it_has_the_weights() -> None:
    async def scenario() -> None:
        world = await World().serving()
        await watched(world, (5, lambda: world.end(0)), (99, nothing))
        assert [each for each in world.events if "check" not in each[1]] == [
            (5.0, "remove http://engine-0:1"),
            (5.0, "kill 0"),
            (5.0, "start 0"),
            (65.0, "restore http://engine-0:3"),
            (65.0, "add http://engine-0:3"),
        ]
        assert world.members == {"http://engine-0:3", "http://engine-1:2"}
        assert [engine.url for engine in world.fleet.serving] == ["http://engine-0:3", "http://engine-1:2"]
        assert world.said == [
            "engine 0 is lost, and will be restarted: engine 0 ended with status 1: out of memory",
            "engine 0 was restarted",
        ]
        assert world.fleet.taken_counts()["rollout/engine_restarts"] == 1

    virtually(scenario)


def test_without_tolerance_the_run_ends_at_once_with_the_last_words() -> None:
    async def scenario() -> None:
        world = await World(tolerant=False).serving()
        with pytest.raises(EngineError, match=r"(?s)The end of the log:.*engine 1 ended with status 1: out of memory"):
            await watched(world, (5, lambda: world.end(1)), (6, nothing))
        assert world.events == []

    virtually(scenario)


def test_engines_are_checked_after_the_first_wait_and_at_the_interval_and_a_stuck_one_is_replaced() -> None:
    async def scenario() -> None:
        world = await World(1).serving()
        await watched(world, (135, lambda: world.stuck.add(0)), (250, nothing))
        # 100 s + 30 s is the first check; the second one, at 160 s, gets no answer for 10 s; the new engine starts
        # within 60 s, and is not looked at in its first 130 s
        assert world.events[:4] == [
            (130.0, "check engine 0 (http://engine-0:1)"),
            (160.0, "check engine 0 (http://engine-0:1)"),
            (170.0, "remove http://engine-0:1"),
            (170.0, "kill 0"),
        ]
        assert world.names()[4:] == ["start 0", "restore http://engine-0:2", "add http://engine-0:2"]
        assert "the health check failed: engine 0" in world.said[0]

    virtually(scenario)


def test_nobody_checks_a_paused_engine_and_an_interrupted_check_begins_anew() -> None:
    async def scenario() -> None:
        world = await World(1).serving()
        world.stuck.add(0)  # as a paused engine seems to be
        await watched(
            world,
            (135, world.fleet.hush),  # 5 s after the check began
            (600, lambda: world.stuck.clear()),
            (601, world.fleet.unhush),
            (620, nothing),
        )
        assert world.events == [
            (130.0, "check engine 0 (http://engine-0:1)"),
            (601.0, "check engine 0 (http://engine-0:1)"),
        ]
        assert world.said == []

    virtually(scenario)


def test_restarts_are_bounded_within_a_period_and_then_the_run_ends_with_the_last_words() -> None:
    async def scenario() -> None:
        world = await World().serving()
        ends = [(100.0 * k, lambda: world.end(0)) for k in range(1, MOST_RESTARTS + 2)]
        with pytest.raises(EngineError) as caught:
            await watched(world, *ends, (10_000, nothing))
        last = str(caught.value).splitlines()[-1]
        assert last == (
            "engine 0 was restarted 5 times within 60 minutes, and is lost again: "
            "engine 0 ended with status 1: out of memory"
        )

    virtually(scenario)


def test_restarts_of_long_ago_do_not_count() -> None:
    async def scenario() -> None:
        world = await World().serving()
        ends = [(PERIOD_S * k, lambda: world.end(0)) for k in range(1, 3)]
        many = [(PERIOD_S * 4 + 100.0 * k, lambda: world.end(0)) for k in range(1, MOST_RESTARTS + 1)]
        await watched(world, *ends, *many, (PERIOD_S * 5, nothing))
        assert world.fleet.taken_counts()["rollout/engine_restarts"] == 2 + MOST_RESTARTS

    virtually(scenario)


def test_an_engine_that_cannot_start_is_tried_again_and_its_own_words_end_the_run() -> None:
    async def scenario() -> None:
        world = await World().serving()
        world.fails_to_start = "engine 0 ended with status 1: no such device"
        with pytest.raises(EngineError, match=r"restarted 5 times .*: engine 0 ended with status 1: no such device"):
            await watched(world, (5, lambda: world.end(0)), (10_000, nothing))
        assert world.names().count("start 0") == MOST_RESTARTS

    virtually(scenario)


def test_an_engine_that_fails_to_get_the_weights_is_lost_again() -> None:
    async def scenario() -> None:
        world = await World().serving()
        world.fails_to_restore = "weight sync, step 'load a to b': engine 0 cannot be reached"
        await watched(
            world, (5, lambda: world.end(0)), (66, lambda: setattr(world, "fails_to_restore", "")), (130, nothing)
        )
        assert [name for name in world.names() if "0" in name and "check" not in name] == [
            *("remove http://engine-0:1", "kill 0", "start 0", "restore http://engine-0:3"),
            *("remove http://engine-0:3", "kill 0", "start 0", "restore http://engine-0:4", "add http://engine-0:4"),
        ]

    virtually(scenario)


def test_an_engine_that_must_wait_for_a_sync_is_asked_for_again_when_others_are_lost() -> None:
    """Whether weights can be had at once may depend on whether any engine is left."""

    async def scenario() -> None:
        world = await World().serving()
        world.can_restore = False
        await watched(
            world,
            (5, lambda: world.end(0)),
            (90, lambda: setattr(world, "can_restore", True)),
            (91, lambda: world.end(1)),
            (99, nothing),
        )
        restores = [each for each in world.events if "restore http://engine-0" in each[1]]
        assert [when for when, _ in restores] == [65.0, 91.0]

    virtually(scenario)


def test_one_who_uses_an_engine_can_say_that_it_is_lost() -> None:
    async def scenario() -> None:
        world = await World().serving()
        await watched(world, (5, lambda: world.fleet.lose(world.fleet[1], "no answer to pause")), (70, nothing))
        assert world.said[0] == "engine 1 is lost, and will be restarted: no answer to pause"
        assert world.fleet[1].url in world.members

    virtually(scenario)


def test_a_router_that_ends_is_restarted_and_requests_wait_for_it() -> None:
    async def scenario() -> None:
        world = await World().serving()
        is_open: list[bool] = []
        await watched(
            world,
            (5, lambda: world.router_words.set_result("the router ended with status 137")),
            (5.5, lambda: is_open.append(world.fleet.is_open)),
            (7, lambda: is_open.append(world.fleet.is_open)),
        )
        assert is_open == [False, True]
        assert world.events == [(5.0, "restart router")]
        assert world.fleet.taken_counts()["rollout/router_restarts"] == 1

    virtually(scenario)


def test_a_router_that_hangs_is_found_by_its_check_and_restarted() -> None:
    async def scenario() -> None:
        world = await World().serving()
        is_open: list[bool] = []
        await watched(
            world,
            (35, lambda: setattr(world, "router_is_stuck", True)),
            (70.5, lambda: is_open.append(world.fleet.is_open)),
            (72, lambda: is_open.append(world.fleet.is_open)),
            (95, nothing),
        )
        # checks at 30 s and 60 s; the second one gets no answer for 10 s; a restart takes 1 s
        assert world.events == [(70.0, "restart router")]
        assert is_open == [False, True]
        assert world.said == [
            "the router is lost, and will be restarted: the health check failed: the router did not answer within 10 s",
            "the router was restarted",
        ]

    virtually(scenario)


def test_without_tolerance_nobody_checks_the_router() -> None:
    """As nobody checks engines: a run that nothing is restarted in ends with its servers' own ends."""

    async def scenario() -> None:
        world = await World(tolerant=False).serving()
        world.router_is_stuck = True
        await watched(world, (100, nothing))
        assert world.events == []

    virtually(scenario)


def test_an_engine_that_the_new_router_does_not_take_is_lost() -> None:
    async def scenario() -> None:
        world = await World().serving()
        world.refused = ["http://engine-1:2"]
        await watched(world, (5, lambda: world.router_words.set_result("gone")), (50, nothing))
        assert world.names() == ["restart router", "remove http://engine-1:2", "kill 1", "start 1"]

    virtually(scenario)


def test_no_request_has_a_way_while_no_engine_serves() -> None:
    async def scenario() -> None:
        world = await World(1).serving()
        is_open: list[bool] = []

        def look() -> None:
            is_open.append(world.fleet.is_open)

        await watched(world, (4, look), (5, lambda: world.end(0)), (6, look), (64, look), (66, look), (99, nothing))
        assert is_open == [True, False, False, True]

    virtually(scenario)
