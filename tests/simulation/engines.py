"""Made-up engines: they sample numbers, each at its own pace, and they end, hang or fail a call.

A token depends on the request's seed, the tokens before it and the weights; its log-prob on the tokens before it, the
token and the weights. So it can be told of any token, long after, under which weights it was sampled.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.simulation.broadcast import BrokenGroup, FakeGroup
from tests.simulation.clock import TICK
from tests.simulation.scenario import Faults
from tests.simulation.world import World, mixed
from vime.serving import answers
from vime.serving.client import ENGINE_ID_PREFIX
from vime.serving.http import Refused, Unreachable
from vime.types import WeightVersion

END = 0  # the token with which a model stops by itself
VOCABULARY = 1000
MEMORY_GIB = {"weights": 4, "kv_cache": 6}


def prefix_of(token_ids: Sequence[int], prefix: int = 0) -> int:
    """A number for all that was before a token; ``prefix``: for what was before these."""
    for token in token_ids:
        prefix = mixed(prefix, token)
    return prefix


def log_prob(prefix: int, token: int, weights: int) -> float:
    """In nats; a multiple of 1/1024, so that nothing is lost when it is written down."""
    return -(1 + mixed(prefix, token, weights, 7) % 8192) / 1024


@dataclass(eq=False, kw_only=True)
class Request:
    """One request on an engine."""

    name: str
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
    disconnected: bool = False

    def disconnect(self) -> None:
        """Whoever asked is gone."""
        self.disconnected = True
        if self.changed is not None:
            _set(self.changed)

    @property
    def is_whole(self) -> bool:
        return len(self.tokens) == self.length

    @property
    def finish_reason(self) -> str:
        return ("stop" if self.ends_with_stop else "length") if self.is_whole else "abort"

    def grow(self, count: int, weights: int, version: WeightVersion) -> None:
        for _ in range(min(count, self.length - len(self.tokens))):
            last = len(self.tokens) == self.length - 1
            drawn = 1 + mixed(self.seed, self.prefix, weights) % (VOCABULARY - 1)
            token = END if last and self.ends_with_stop else drawn
            self.tokens.append(token)
            self.log_probs.append(log_prob(self.prefix, token, weights))
            self.versions.append(version)
            self.prefix = mixed(self.prefix, token)

    def answer(self) -> dict[str, Any]:
        """As an engine of ours writes it."""
        spans: list[answers.Span] = [
            {"version": str(version), "start": place, "end": place + 1} for place, version in enumerate(self.versions)
        ]
        found: dict[str, Any] = orjson.loads(answers.encode(self.tokens, self.log_probs, spans, self.finish_reason))
        return found


class FakeEngine:
    """One engine process, from its start to its end. ``call`` is its HTTP server."""

    def __init__(self, world: World, index: int, number: int, faults: Faults) -> None:
        self._world = world
        self._faults = faults
        self.index, self.number = index, number  # its place, and how many were there before
        self.url = f"http://engine-{index}-{number}"
        self.last_words: str | None = None  # once it has ended
        self.ended = asyncio.Event()
        self.hangs = False
        self.weights = 0
        self.version: WeightVersion = 0
        self.paused = self.asleep = False
        self.has_served = False  # it has been through a sync: the first one of a run must not fail
        self.requests: list[Request] = []
        self._calls = self._finished = 0
        self._group: FakeGroup | None = None  # of which it is a member
        self._rank = 0  # there
        self._take("weights", "kv_cache")

    def __str__(self) -> str:
        return f"engine {self.index}.{self.number}"

    @property
    def is_healthy(self) -> bool:
        return self.last_words is None and not self.hangs

    async def call(self, path: str, body: Any) -> Any:
        """Raises what a client sees if the process ends, or fails the call."""
        place, _, query = path.partition("?")
        verb = place.rpartition("/")[2]
        if verb == "generate":
            return await self.serve(self.request(body))
        await self._take_time(verb)
        handler = getattr(self, f"_{verb}", None)
        answer = handler(query if body is None else body) if handler is not None else None
        return await self._or_end(answer, verb) if inspect.isawaitable(answer) else answer

    async def _or_end(self, answer: Coroutine[Any, Any, Any], verb: str) -> Any:
        """What comes of a call that takes its time, if the engine lives to tell."""
        task, ended = asyncio.ensure_future(answer), asyncio.ensure_future(self.ended.wait())
        try:
            await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
            if self.hangs:
                await ended
            if self.last_words is not None:
                raise Unreachable(f"{self} cannot be reached for {verb}")
            return task.result()
        except BrokenGroup as error:
            raise Refused(f"{self} answered {verb} with 500: {error}", 500) from None
        finally:
            task.cancel()
            ended.cancel()
            await asyncio.gather(task, ended, return_exceptions=True)

    async def serve(self, request: Request) -> dict[str, Any]:
        self.requests.append(request)
        loop = asyncio.get_running_loop()
        try:
            while True:
                if self.last_words is not None or request.disconnected:
                    raise Unreachable(f"the connection to {self} broke")
                if not self.hangs and (request.aborted or request.is_whole):
                    self._finished += 1
                    return request.answer()
                request.changed = loop.create_future()
                request.since = None if self.paused or self.asleep or self.hangs else loop.time()
                if request.since is not None:
                    left = (request.length - len(request.tokens)) * request.pace_s
                    loop.call_later(left, _set, request.changed)
                await request.changed
                self._settle_one(request)
        finally:
            self.requests.remove(request)

    def end(self, last_words: str) -> None:
        """The process ends, and takes all requests with it."""
        if self.last_words is None:
            self._world.tell("engine ended", engine=str(self), requests=len(self.requests), why=last_words)
            self.last_words = last_words
            self._free("weights", "kv_cache")
            self.ended.set()
            self._wake()

    def hang(self) -> None:
        """It answers nothing any more, until it is killed."""
        if self.last_words is None:
            self._world.tell("engine hangs", engine=str(self), requests=len(self.requests))
            self._settle()
            self.hangs = True
            self._wake()

    # what calls do, by the last part of their path: with their body, or their query where they have none

    def _sleep(self, query: str) -> None:
        self._settle()
        self.asleep = True
        self.weights = 0 if "level=2" in query else self.weights
        self._free("weights", "kv_cache")

    def _wake_up(self, query: str) -> None:
        if "kv_cache" not in query:
            self._take("weights")
        if "weights" not in query:
            self._take("kv_cache")
            self.asleep = self.paused = False  # as vLLM does, whatever paused it
            self.has_served = self.has_served or self.version > 0
            self._wake()

    def _take(self, *parts: str) -> None:
        for part in parts:
            self._world.devices.take(self.index, f"{part} of {self}", MEMORY_GIB[part])

    def _free(self, *parts: str) -> None:
        self._world.devices.free(self.index, *(f"{part} of {self}" for part in parts))

    def _pause(self, body: Any) -> None:
        self._settle()
        self.paused = True
        self._wake()

    def _resume(self, body: Any) -> None:
        assert not self.asleep, f"{self} was resumed without memory for keys and values"
        self.paused, self.has_served = False, True
        self._wake()

    def _get_world_size(self, body: Any) -> dict[str, int]:
        return {"world_size": 1}

    def _init_weight_transfer_engine(self, body: Any) -> Coroutine[Any, Any, None] | None:
        """Joins the group to which it is invited, if it is."""
        if (rank := body["init_info"].get("rank_offset")) is None:
            return None
        self._rank, self._group = rank, self._world.group
        assert self._group is not None
        return self._group.join(rank, lambda: self.is_healthy)

    def _update_weights(self, body: Any) -> Coroutine[Any, Any, None] | None:
        if (path := body["update_info"].get("path")) is None:
            return self._receive()
        self.weights = self._world.shared[path]
        return None

    async def _receive(self) -> None:
        assert self._group is not None
        self.weights = await self._group.receive(self._rank)

    def _finish_weight_update(self, body: Any) -> None:
        self.version = int(body["weight_version"])

    def _abort_requests(self, body: Any) -> None:
        self._settle()
        names = body.get("request_ids")
        for request in self.requests:
            request.aborted |= names is None or request.name in names
        self._wake()

    def _progress(self, body: Any) -> dict[str, Any]:
        self._settle()
        running = {request.name: len(request.tokens) for request in self.requests}
        return {"server": 1, "finished": self._finished, "running": running}

    def request(self, body: Any) -> Request:
        """How long an answer gets and how fast it comes depends on who asks and with which seed."""
        chance, params, name = self._world.chance, body["sampling_params"], body.get("request_id", "probe")
        seed, most = params["seed"], params["max_tokens"]
        long_tail = chance.fraction("length", seed) ** 3  # most are short, a few very long
        wanted = 1 + int(long_tail * 1.25 * most) if not params["ignore_eos"] else most + 1
        slow = chance.hits(self._faults.stragglers, "straggler", seed)
        return Request(
            name=ENGINE_ID_PREFIX + name,
            prefix=prefix_of(body["token_ids"]),
            seed=seed,
            length=min(wanted, most),
            ends_with_stop=wanted <= most,
            pace_s=chance.pick((24, 48, 96), "pace", seed) * (16 if slow else 1) * TICK,
        )

    def _settle(self) -> None:
        for request in self.requests:
            self._settle_one(request)

    def _settle_one(self, request: Request) -> None:
        """Samples what the time since the last change was enough for, under the weights of that time."""
        if request.since is not None and self.is_healthy:
            now = asyncio.get_running_loop().time()
            request.grow(int((now - request.since) / request.pace_s), self.weights, self.version)
            request.since = now

    def _wake(self) -> None:
        for request in self.requests:
            if request.changed is not None:
                _set(request.changed)

    async def _take_time(self, verb: str) -> None:
        """The time that a call takes, and its failure if that is its fate."""
        self._calls += 1
        chance, identity = self._world.chance, (verb, str(self), self._world.life, self._calls)
        # how much of an answer there is when it is aborted must not differ from life to life
        await asyncio.sleep(8 * TICK if verb == "abort_requests" else chance.seconds(TICK, 64 * TICK, *identity))
        if self.hangs:
            await self.ended.wait()
        if self.last_words is not None:
            raise Unreachable(f"{self} cannot be reached for {verb}")
        if self.has_served and self.number < 3 and chance.hits(self._faults.control_fails, "control fails", *identity):
            self._world.tell("call failed", engine=str(self), verb=verb)
            raise Refused(f"{self} answered {verb} with 500", 500)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
