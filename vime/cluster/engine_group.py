"""The engines' processes and their router."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import ray

from vime.cluster.actors import EngineActor, environment
from vime.cluster.addresses import node_address
from vime.cluster.calls import RemoteError, wait_all
from vime.cluster.placement import Placement
from vime.config import Config
from vime.serving.control import EngineControl
from vime.serving.http import EngineError
from vime.serving.router import RouterServer

KILL_TIMEOUT_S = 60.0  # a server has 5 s to end by itself, and its processes are gone soon after
FOREVER_S = 10 * 365 * 86400.0


class EngineGroup:
    """Implements ``supervision.Processes``: starts the engines through Ray, and the router on this node; ends both."""

    def __init__(self, config: Config, placement: Placement, threads: int, log_dir: Path) -> None:
        self._config = config
        self._placement = placement
        self._threads = threads
        self._log_dir = log_dir
        self._timeout_s = config.engine.engine_start_timeout_s
        self._restarts = [0] * config.cluster.num_engines
        self._engines = [self._actor(index) for index in range(config.cluster.num_engines)]
        self.router = RouterServer.from_config(config, log_dir=log_dir, host=node_address())
        self.router_url = ""

    def _actor(self, index: int) -> Any:
        # an engine is watched, and can be stopped and asked for its memory, while it starts
        actor = ray.remote(max_concurrency=4)(EngineActor)
        options = self._placement.engine(index)
        return actor.options(runtime_env={"env_vars": environment(self._threads)}, **options).remote(
            self._config,
            index,
            self._placement.devices(index),
            self._threads,
            self._log_dir,
            restarts=self._restarts[index],
        )

    async def start(self) -> list[EngineControl]:
        """Raises RemoteError with the engine's own last words if one does not become healthy."""
        starts = [engine.start.remote() for engine in self._engines]
        urls = await wait_all(starts, what="starting the engines", timeout_s=self._timeout_s + 60)
        self.router_url = await self.router.start(urls)
        return [self._control(index, url) for index, url in enumerate(urls)]

    def _control(self, index: int, url: str) -> EngineControl:
        return EngineControl(url, f"engine {index}")

    async def start_engine(self, index: int) -> EngineControl:
        """Another one in the place of one that was killed. Raises EngineError with its last words."""
        self._restarts[index] += 1
        self._engines[index] = self._actor(index)
        what = f"starting engine {index} again"
        try:
            (url,) = await wait_all([self._engines[index].start.remote()], what=what, timeout_s=self._timeout_s + 60)
        except RemoteError as error:
            raise EngineError(str(error)) from None
        return self._control(index, url)

    async def ended(self, index: int) -> str:
        """Waits until the engine ends, or the process that has started it; returns the last words."""
        call = self._engines[index].ended.remote()
        try:
            (words,) = await wait_all([call], what=f"engine {index}", timeout_s=FOREVER_S)
        except RemoteError as error:
            return str(error)
        return str(words)

    async def failure(self, index: int) -> str | None:
        """The engine's last words, or None while it runs."""
        call = self._engines[index].failure.remote()
        try:
            (words,) = await wait_all([call], what=f"engine {index}", timeout_s=30)
        except RemoteError as error:
            return str(error)
        return None if words is None else str(words)

    async def kill(self, index: int) -> None:
        """Ends all processes of the engine. Never raises."""
        engine = self._engines[index]
        with contextlib.suppress(RemoteError):  # it is stuck, or dead; its processes do not outlive it
            await wait_all([engine.stop.remote()], what=f"stopping engine {index}", timeout_s=KILL_TIMEOUT_S)
        ray.kill(engine)

    async def memory_gib(self) -> dict[str, float]:
        """By kind (see ``EngineActor.memory_gib``), the largest over the engines."""
        calls = [engine.memory_gib.remote() for engine in self._engines]
        held: dict[str, float] = {}
        for answer in await wait_all(calls, what="asking the engines for their memory", timeout_s=60):
            held |= {kind: max(size, held.get(kind, 0.0)) for kind, size in answer.items()}
        return held

    async def failures(self) -> list[str]:
        """One line, and the end of its log, for each engine that is gone, and for the router."""
        answers = [await self.failure(index) for index in range(len(self._engines))]
        return [answer for answer in [*answers, self.router.failure()] if answer]

    async def stop(self) -> None:
        """Never raises; what does not end in time is killed with its actor."""
        try:
            self.router.stop()
            await wait_all([e.stop.remote() for e in self._engines], what="stopping the engines", timeout_s=60)
        except Exception:
            for engine in self._engines:
                ray.kill(engine)
