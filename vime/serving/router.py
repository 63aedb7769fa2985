"""The router in front of the engines: started here, or one that runs already and is only told of the engines."""

from __future__ import annotations

import asyncio
import os
import sys
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.config.foreign import command_words
from vime.serving.http import EngineError, HttpServer
from vime.serving.process import ReservedPort, ServerProcess

if TYPE_CHECKING:
    from vime.config import Config

LOOPBACK = "127.0.0.1"
POLL_S = 0.1
START_TIMEOUT_S = 60.0  # the engines are healthy before; the router itself is up in about a second
DEREGISTER_TIMEOUT_S = 2.0


class RouterServer:
    """The address to which all generation requests go.

    Args:
        flags: the router's flags, by attribute name; they win over defaults of ours.
        external: (host, port) of a router which runs already; this object then only adds and removes engines there.
        request_timeout_s: how long the router waits for an engine's answer.
    """

    def __init__(
        self,
        *,
        flags: Mapping[str, Any] | None = None,
        external: tuple[str, int] | None = None,
        host: str = LOOPBACK,
        port: int = 0,
        log_dir: Path,
        request_timeout_s: float = 1800.0,
    ) -> None:
        self._flags = dict(flags or {})
        self._external = external
        self._host = host
        self._port = port
        self._log = log_dir / "router.log"
        self._request_timeout_s = request_timeout_s
        self._reserved: list[ReservedPort] = []
        self._process: ServerProcess | None = None
        self._engine_urls: list[str] = []
        self.url = f"http://{external[0]}:{external[1]}" if external else ""

    @classmethod
    def from_config(cls, config: Config, *, log_dir: Path, host: str = LOOPBACK) -> RouterServer:
        """An address given by --vllm-router-ip is a router that runs already; a port alone is for the one to start."""
        engine = config.engine
        address, port = engine.vllm_router_ip, engine.vllm_router_port or 0
        return cls(
            flags=config.router,
            external=(address, port) if address else None,
            host=host,
            port=port,
            log_dir=log_dir,
            request_timeout_s=engine.request_timeout_s,
        )

    async def start(self, engine_urls: Sequence[str]) -> str:
        """Puts the engines, which must be healthy, behind the router and returns its URL once it sees all of them.

        Raises:
            UserError: the port is in use.
            EngineError: the router ended or is unreachable, or does not find the engines healthy in time.
        """
        self._engine_urls = list(engine_urls)
        if not self._external:
            self._launch()
        router = HttpServer("the router", self.url)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                if self._external:
                    await self._register(router)
                while missing := await self._not_healthy(router):  # noqa: ASYNC110  another process sets no event
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            self.stop()
            raise EngineError(f"{router} did not find these engines healthy: {', '.join(missing)}") from None
        except BaseException:
            self.stop()
            raise
        finally:
            await router.close()
        return self.url

    def _launch(self) -> None:
        port = ReservedPort(self._host, self._port, flag="--vllm-router-port")
        metrics = ReservedPort(LOOPBACK)
        self._reserved = [port, metrics]
        self.url = f"http://{self._host}:{port.number}"
        defaults = {
            "policy": "consistent_hash",  # a session stays on the engine that has its keys and values cached
            "request_timeout_secs": int(self._request_timeout_s) + 1,
            "worker_startup_timeout_secs": int(START_TIMEOUT_S),
            "worker_startup_check_interval": 1,
            "log_level": "warning",
        }
        owned = {
            "host": self._host,
            "port": port.number,
            "prometheus_port": metrics.number,
            "worker_urls": self._engine_urls,
        }
        words = command_words("router", defaults | self._flags | owned)
        command = [sys.executable, "-m", "vllm_router.launch_router", *words]
        self._process = ServerProcess("the router", command, log=self._log, environment=_no_proxy(self._engine_urls))

    async def _register(self, router: HttpServer) -> None:
        known = await self._workers(router)
        for url in self._engine_urls:
            if url not in known:
                await router.call("POST", "/workers", {"url": url}, timeout_s=START_TIMEOUT_S)

    async def _not_healthy(self, router: HttpServer) -> list[str]:
        failure = self.failure()
        if failure is not None:
            raise EngineError(failure)
        try:
            workers = await self._workers(router)
        except EngineError:
            if self._external:
                raise
            return ["(the router does not answer yet)"]
        return [url for url in self._engine_urls if not workers.get(url, False)]

    async def _workers(self, router: HttpServer) -> dict[str, bool]:
        """URL → whether the router holds it to be healthy."""
        answer = await router.call("GET", "/workers", timeout_s=10)
        return {worker["url"]: worker["is_healthy"] for worker in answer["workers"]}

    def failure(self) -> str | None:
        """Why our router is gone, or None while it runs or is somebody else's."""
        return self._process.failure() if self._process is not None else None

    def stop(self) -> None:
        """Ends our router, or takes the engines out of somebody else's. Never raises."""
        if self._external:
            for url in self._engine_urls:
                self._deregister(url)
        if self._process is not None:
            self._process.stop()
        for port in self._reserved:
            port.release()

    def _deregister(self, engine_url: str) -> None:
        path = f"/workers/{urllib.parse.quote(engine_url, safe='')}"
        request = urllib.request.Request(self.url + path, method="DELETE")
        try:
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=DEREGISTER_TIMEOUT_S)
        except OSError:  # it is gone, or never knew the engine: either way it does not send requests there
            return


def _no_proxy(urls: Sequence[str]) -> dict[str, str]:
    """The router would send requests for engines through a proxy that the environment names for the internet."""
    hosts = {LOOPBACK, "localhost", *(urllib.parse.urlsplit(url).hostname or "" for url in urls)}
    value = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), *sorted(hosts)]))
    return {"NO_PROXY": value, "no_proxy": value}
