"""The made-up cluster: engine processes, the router in front of them, and the network between all and the driver."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from tests.simulation.clock import TICK
from tests.simulation.engines import MEMORY_GIB, FakeEngine, Request
from tests.simulation.scenario import Faults
from tests.simulation.world import World
from vime.serving.answers import GENERATE
from vime.serving.control import EngineControl
from vime.serving.http import EngineError, HttpServer, Late, Refused, Unreachable

LATENCY_S = 4 * TICK  # of a request on its way
FIRST_SYNC_S = 5.0  # is over by then: what fails in it ends a run
ROUTER = "http://router"

MakeEngine = Callable[[World, int, int, Faults], FakeEngine]


class FakeRouter:
    """Implements ``supervision.Router`` and ``fleet.Membership``, and is the router's HTTP server."""

    def __init__(self, world: World, engines: Mapping[str, FakeEngine], faults: Faults) -> None:
        self._world = world
        self._engines = engines
        self._faults = faults
        self._members: list[str] = []
        self._attempts: dict[tuple[str, int], int] = {}
        self._ended = asyncio.Event()
        self._hangs = False
        self._under_way: list[Request] = []

    # the process

    async def ended(self) -> str:
        await self._ended.wait()
        return "the router ended with status -9"

    def end(self) -> None:
        self._world.tell("router ended")
        self._ended.set()
        for request in self._under_way:
            request.disconnect()

    def hang(self) -> None:
        """It takes requests, and answers nothing any more, until it is killed."""
        if not self._ended.is_set():
            self._world.tell("router hangs")
            self._hangs = True

    async def check(self, timeout_s: float) -> None:
        await asyncio.sleep(LATENCY_S)
        if self._hangs:
            await asyncio.sleep(timeout_s)
            raise Late(f"the router did not answer /workers within {timeout_s:g} s")

    async def restart(self) -> list[str]:
        if not self._ended.is_set():
            self.end()
        await asyncio.sleep(2.0)
        refused = [url for url in self._members if not self._engines[url].is_healthy]
        self._members = [url for url in self._members if url not in refused]
        self._world.tell("router started", refused=refused)
        self._ended = asyncio.Event()
        self._hangs = False
        return refused

    async def add(self, url: str) -> None:
        await asyncio.sleep(LATENCY_S)
        if self._ended.is_set():
            raise Unreachable("the router cannot be reached for /add_worker")
        if url in self._members:
            return
        engine = self._engines[url]
        if 0 < engine.number < 3 and self._world.chance.hits(
            self._faults.not_taken, "not taken", url, self._world.life
        ):
            self._world.tell("engine not taken", engine=str(engine))
            raise Refused("the router answered with 400: the worker is not healthy", 400)
        self._members.append(url)

    async def remove(self, url: str) -> None:
        await asyncio.sleep(LATENCY_S)
        if url in self._members:
            self._members.remove(url)

    # the server

    async def call(self, body: Any, session: str) -> Any:
        seed = body["sampling_params"]["seed"]
        attempt = self._attempts[session, seed] = self._attempts.get((session, seed), 0) + 1
        identity = (session, seed, attempt)
        self._world.tell("request", session=session, at=len(body["token_ids"]), attempt=attempt)
        await asyncio.sleep(LATENCY_S)
        chance, faults = self._world.chance, self._faults
        if self._hangs:
            await self._ended.wait()
        if self._ended.is_set():
            raise Unreachable("the router cannot be reached")
        if not self._members or chance.hits(faults.refused, "refused", *identity):
            raise Refused("the router answered with 503", 503)
        engine = self._engines[chance.pick(self._members, "route", session)]
        request = engine.request(body)
        self._under_way.append(request)
        try:
            answer = await engine.serve(request)
        finally:
            self._under_way.remove(request)
        await asyncio.sleep(LATENCY_S)
        lost = chance.hits(faults.lost_replies, "lost", *identity)
        if lost:
            self._world.tell("reply lost", session=session)
        if lost or self._hangs:
            await self._ended.wait()
        if self._ended.is_set():
            raise Unreachable("the router broke the connection")
        self._world.tell("answer", session=session, reason=answer["finish_reason"], engine=str(engine))
        return answer


class FakeCluster:
    """Implements ``supervision.Processes``."""

    def __init__(self, world: World, count: int, faults: Faults, make_engine: MakeEngine) -> None:
        self._world = world
        self._faults = faults
        self._make = make_engine
        self._places: list[list[FakeEngine]] = [[] for _ in range(count)]  # all that ever were there
        self._by_url: dict[str, FakeEngine] = {}
        self.router = FakeRouter(world, self._by_url, faults)

    @property
    def engines(self) -> list[FakeEngine]:
        return list(self._by_url.values())

    async def start(self) -> list[EngineControl]:
        """All engines and the router, for the first time."""
        world, loop = self._world, asyncio.get_running_loop()
        if world.chance.hits(self._faults.router_death, "router ends", world.life):
            hangs = world.chance.hits(0.3, "router hangs", world.life)
            seconds = world.chance.seconds(2, 40, "router's life", world.life)
            loop.call_later(seconds, self.router.hang if hangs else self.router.end)
        if world.chance.hits(self._faults.outage, "outage", world.life):
            loop.call_later(world.chance.seconds(FIRST_SYNC_S, 20, "outage", world.life), self._lose_all)
        return [self._started(index) for index in range(len(self._places))]

    def _lose_all(self) -> None:
        for place in self._places:
            place[-1].end("the power failed")

    async def start_engine(self, index: int) -> EngineControl:
        number = len(self._places[index])
        identity = (index, number, self._world.life)
        self._world.devices.take(index, "an engine that starts", sum(MEMORY_GIB.values()))
        await asyncio.sleep(self._world.chance.seconds(2, 20, "start of an engine", *identity))
        self._world.devices.free(index, "an engine that starts")
        if number < 3 and self._world.chance.hits(self._faults.starts_fail, "start fails", *identity):
            self._places[index].append(self._make(self._world, index, number, self._faults))
            self._places[index][-1].end("it found no memory")
            raise EngineError(f"engine {index} did not start")
        return self._started(index)

    def _started(self, index: int) -> EngineControl:
        world, loop, number = self._world, asyncio.get_running_loop(), len(self._places[index])
        engine = self._make(world, index, number, self._faults)
        self._places[index].append(engine)
        self._by_url[engine.url] = engine
        world.tell("engine started", engine=str(engine))
        identity = (index, number, world.life)
        if number < 3 and world.chance.hits(self._faults.engine_deaths, "engine ends", *identity):
            seconds = world.chance.seconds(1 if number else FIRST_SYNC_S, 40, "engine's life", *identity)
            if world.chance.hits(0.3, "hangs", *identity):
                loop.call_later(seconds, engine.hang)
            else:
                loop.call_later(seconds, engine.end, f"{engine} ended with status -9")
        return EngineControl(engine.url, f"engine {index}")

    async def ended(self, index: int) -> str:
        engine = self._places[index][-1]
        await engine.ended.wait()
        return str(engine.last_words)

    async def failure(self, index: int) -> str | None:
        return self._places[index][-1].last_words

    async def kill(self, index: int) -> None:
        await asyncio.sleep(LATENCY_S)
        self._places[index][-1].end("killed")

    async def call(
        self, server: HttpServer, path: str, body: Any, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Any:
        """What ``HttpServer.call`` does, in this cluster."""
        try:
            async with asyncio.timeout(timeout_s):
                if server.url == ROUTER:
                    assert path == GENERATE and headers is not None
                    return await self.router.call(body, headers["x-session-id"])
                return await self._by_url[server.url].call(path, body)
        except TimeoutError:
            raise Late(f"{server} did not answer {path} within {timeout_s:g} s") from None

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """All HTTP within goes to this cluster."""

        async def call(
            server: HttpServer, method: str, path: str, body: Any = None, *, read: Any = None, **options: Any
        ) -> Any:
            return await self.call(server, path, body, **options)  # which answers with what was read

        with mock.patch.object(HttpServer, "call", call):
            yield
