"""Made-up engines behind a made-up router: they sample numbers, at their own pace, and they fail.

A token depends on the request's seed, the tokens before it and the weights; its log-prob on the tokens before it, the
token and the weights. So it can be told of any token, long after, under which weights it was sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tests.simulation.clock import TICK
from tests.simulation.scenario import Faults
from tests.simulation.world import World, mixed
from vime.serving.http import EngineError
from vime.types import Generation, SamplingParams, WeightVersion

END = 0  # the token with which a model stops by itself
VOCABULARY = 1000
LATENCY_S = 4 * TICK  # of a request on its way
DEADLINE_S = 64.0  # after which a client stops waiting for a reply
ABORT_TIMEOUT_S = 60.0


def prefix_of(token_ids: Sequence[int], prefix: int = 0) -> int:
    """A number for all that was before a token; ``prefix``: for what was before these."""
    for token in token_ids:
        prefix = mixed(prefix, token)
    return prefix


def log_prob(prefix: int, token: int, weights: int) -> float:
    """In nats; a multiple of 1/1024, so that nothing is lost when it is written down."""
    return -(1 + mixed(prefix, token, weights, 7) % 8192) / 1024


@dataclass(eq=False)
class Request:
    """One request on an engine."""

    prefix: int
    seed: int
    length: int  # tokens that it will have
    ends_with_stop: bool
    pace_s: float  # seconds a token
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[WeightVersion] = field(default_factory=list)
    since: float | None = None  # when its next token began; None while the engine is paused
    changed: asyncio.Future[None] | None = None
    aborted: bool = False

    def grow(self, count: int, weights: int, version: WeightVersion) -> None:
        for _ in range(min(count, self.length - len(self.tokens))):
            last = len(self.tokens) == self.length - 1
            drawn = 1 + mixed(self.seed, self.prefix, weights) % (VOCABULARY - 1)
            token = END if last and self.ends_with_stop else drawn
            self.tokens.append(token)
            self.log_probs.append(log_prob(self.prefix, token, weights))
            self.versions.append(version)
            self.prefix = mixed(self.prefix, token)

    def answer(self) -> Generation:
        whole = len(self.tokens) == self.length
        return Generation(
            token_ids=list(self.tokens),
            log_probs=list(self.log_probs),
            weight_versions=list(self.versions),
            finish_reason=("stop" if self.ends_with_stop else "length") if whole else "abort",
        )


class FakeEngine:
    """Stands for an ``EngineControl`` and the process behind it."""

    def __init__(self, world: World, index: int, faults: Faults) -> None:
        self._world = world
        self._faults = faults
        self.index = index
        self.url = f"http://engine-{index}"
        self.dead: str | None = None  # what a weight sync sets
        self.alive = True  # the process runs
        self.routed = True  # and the router sends it requests
        self.weights = 0
        self.version: WeightVersion = 0
        self.paused = False
        self.requests: list[Request] = []
        self._calls = 0

    def __str__(self) -> str:
        return f"engine {self.index}"

    # the verbs of a weight sync

    async def pause(self, mode: Literal["keep"] = "keep", *, timeout_s: float) -> None:
        await self._call("pause", timeout_s)
        self._settle()
        self.paused = True
        self._wake()

    async def start_update(self, *, timeout_s: float) -> None:
        await self._call("start", timeout_s)

    async def load(self, weights: int, *, timeout_s: float) -> None:
        await self._call("load", timeout_s)
        self._settle()
        self.weights = weights

    async def finish_update(self, version: WeightVersion, *, timeout_s: float) -> None:
        await self._call("finish", timeout_s)
        self._settle()
        self.version = version

    async def reset_prefix_cache(self, *, timeout_s: float) -> None:
        await self._call("reset", timeout_s)

    async def resume(self, *, timeout_s: float) -> None:
        await self._call("resume", timeout_s)
        self.paused = False
        self._wake()

    async def abort_all(self, *, timeout_s: float) -> None:
        await self._call("abort", timeout_s)
        self.abort()

    # what the router does

    async def serve(self, request: Request) -> Generation:
        """Raises EngineError if the engine dies meanwhile."""
        self.requests.append(request)
        loop = asyncio.get_running_loop()
        try:
            while True:
                if not self.alive:
                    raise EngineError(f"{self} died")
                if request.aborted or len(request.tokens) == request.length:
                    return request.answer()
                request.changed = loop.create_future()
                request.since = None if self.paused else loop.time()
                if request.since is not None:
                    left = (request.length - len(request.tokens)) * request.pace_s
                    loop.call_later(left, _set, request.changed)
                await request.changed
                self._settle_one(request)
        finally:
            self.requests.remove(request)

    def abort(self) -> None:
        """Ends all requests; each answers with what it has."""
        self._settle()
        for request in self.requests:
            request.aborted = True
        self._wake()

    def die(self) -> None:
        """Takes all requests with it."""
        self._world.tell("engine died", engine=self.index, requests=len(self.requests))
        self.alive = self.routed = False
        self._wake()

    def start_again(self) -> None:
        """As a new process, with the weights that it finds on the disk."""
        self._world.tell("engine started", engine=self.index)
        self.alive, self.dead, self.paused = True, None, False
        self.weights, self.version = 0, 0

    def _settle(self) -> None:
        for request in self.requests:
            self._settle_one(request)

    def _settle_one(self, request: Request) -> None:
        """Samples what the time since the last change was enough for, under the weights of that time."""
        if request.since is not None and self.alive:
            now = asyncio.get_running_loop().time()
            request.grow(int((now - request.since) / request.pace_s), self.weights, self.version)
            request.since = now

    def _wake(self) -> None:
        for request in self.requests:
            if request.changed is not None:
                _set(request.changed)

    async def _call(self, verb: str, timeout_s: float) -> None:
        """The time that a call takes, and its failure if that is its fate."""
        self._calls += 1
        chance, identity = self._world.chance, (verb, self.index, self._world.life, self._calls)
        await asyncio.sleep(chance.seconds(TICK, 64 * TICK, "control", *identity))
        if not self.alive:
            raise EngineError(f"{self} cannot be reached for {verb}")
        if chance.hits(self._faults.control_fails, "control fails", *identity):
            self._world.tell("control failed", engine=self.index, verb=verb)
            raise EngineError(f"{self} answered {verb} with 500")


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class FakeClient:
    """Implements ``ports.Generator``: the router, and what befalls requests on their way."""

    def __init__(self, world: World, engines: Sequence[FakeEngine], faults: Faults) -> None:
        self._world = world
        self.engines = list(engines)
        self._faults = faults
        self._attempts: dict[tuple[str, int], int] = {}
        self._aborts = 0
        self._in_flight = 0

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session_id: str) -> Generation:
        assert params.seed is not None
        attempt = self._attempts[session_id, params.seed] = self._attempts.get((session_id, params.seed), 0) + 1
        identity = (session_id, params.seed, attempt)
        self._world.tell("request", session=session_id, at=len(token_ids), attempt=attempt)
        self._in_flight += 1
        try:
            answer = await self._answer(self._request(token_ids, params, identity), identity)
        except EngineError as error:
            self._world.tell("request failed", session=session_id, why=str(error))
            raise
        finally:
            self._in_flight -= 1
        self._world.tell(
            "answer", session=session_id, tokens=len(answer.token_ids), versions=answer.weight_versions[:1],
            reason=answer.finish_reason,
        )  # fmt: skip
        return answer

    async def abort(self) -> None:
        """Returns when each request in flight has answered; requests may still be on their way when it is called."""
        self._world.tell("abort", requests=self._in_flight)
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                while self._in_flight:
                    for engine in self.engines:
                        engine.abort()
                    await asyncio.sleep(8 * TICK)
        except TimeoutError:
            left = self._in_flight
            raise EngineError(f"{left} requests did not end within {ABORT_TIMEOUT_S:g} s of being aborted") from None
        self._world.tell("aborted")

    def _request(self, token_ids: Sequence[int], params: SamplingParams, identity: tuple[str, int, int]) -> Request:
        chance, (session, seed, attempt) = self._world.chance, identity
        assert params.seed is not None
        long_tail = chance.fraction("length", session, seed) ** 3  # most are short, a few very long
        wanted = 1 + int(long_tail * 1.25 * params.max_tokens)
        slow = chance.hits(self._faults.stragglers, "straggler", session, seed, attempt)
        pace = chance.pick((24, 48, 96), "pace", session, seed) * (16 if slow else 1) * TICK
        return Request(
            prefix=prefix_of(token_ids),
            seed=params.seed,
            length=min(wanted, params.max_tokens),
            ends_with_stop=wanted <= params.max_tokens,
            pace_s=pace,
        )

    async def _answer(self, request: Request, identity: tuple[str, int, int]) -> Generation:
        await asyncio.sleep(LATENCY_S)
        chance, faults = self._world.chance, self._faults
        if chance.hits(faults.refused, "refused", *identity):
            raise EngineError("the router answered with 503")
        there = [engine for engine in self.engines if engine.routed]
        if not there:
            await asyncio.sleep(4.0)  # the client tries again for so long
            raise EngineError("the router has no engine left")
        engine = chance.pick(there, "route", identity[0])
        answer = await engine.serve(request)
        await asyncio.sleep(LATENCY_S)
        if chance.hits(faults.lost_replies, "lost", *identity):
            await asyncio.sleep(DEADLINE_S)
            raise EngineError(f"the router did not answer a request of session {identity[0]} within {DEADLINE_S:g} s")
        return answer
