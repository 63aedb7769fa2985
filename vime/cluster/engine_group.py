"""The engines and their router."""

from __future__ import annotations

from pathlib import Path

import ray

from vime.cluster.actors import EngineActor, environment
from vime.cluster.addresses import node_address
from vime.cluster.calls import wait_all
from vime.cluster.placement import Placement
from vime.config import Config
from vime.serving.router import RouterServer


class EngineGroup:
    """Starts the engines through Ray and the router on this node, and ends both."""

    def __init__(self, config: Config, placement: Placement, threads: int, log_dir: Path) -> None:
        self._timeout_s = config.engine.engine_start_timeout_s
        actor = ray.remote(max_concurrency=2)(EngineActor)  # an engine can be stopped while it starts
        env = {"env_vars": environment(threads)}
        self._engines = [
            actor.options(runtime_env=env, **placement.engine(index)).remote(
                config, index, placement.devices(index), threads, log_dir
            )
            for index in range(config.cluster.num_engines)
        ]
        self._router = RouterServer.from_config(config, log_dir=log_dir, host=node_address())
        self.urls: list[str] = []
        self.router_url = ""

    async def start(self) -> None:
        """Raises RemoteError with the engine's own last words if one does not become healthy."""
        starts = [engine.start.remote() for engine in self._engines]
        self.urls = await wait_all(starts, what="starting the engines", timeout_s=self._timeout_s + 60)
        self.router_url = await self._router.start(self.urls)

    async def memory_gib(self) -> dict[str, float]:
        """By kind (see ``EngineActor.memory_gib``), the largest over the engines."""
        calls = [engine.memory_gib.remote() for engine in self._engines]
        held: dict[str, float] = {}
        for answer in await wait_all(calls, what="asking the engines for their memory", timeout_s=60):
            held |= {kind: max(size, held.get(kind, 0.0)) for kind, size in answer.items()}
        return held

    async def failures(self) -> list[str]:
        """One line, and the end of its log, for each engine that is gone, and for the router."""
        answers = await wait_all([e.failure.remote() for e in self._engines], what="asking the engines", timeout_s=300)
        return [answer for answer in [*answers, self._router.failure()] if answer]

    async def stop(self) -> None:
        """Never raises; what does not end in time is killed with its actor."""
        try:
            self._router.stop()
            await wait_all([e.stop.remote() for e in self._engines], what="stopping the engines", timeout_s=60)
        except Exception:
            for engine in self._engines:
                ray.kill(engine)
