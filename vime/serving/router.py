"""The router in front of the engines: started here, or one that runs already and is only told of the engines."""

from __future__ import annotations

import asyncio
import os
import sys
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.config.foreign import command_words
from vime.platform.sockets import LOOPBACK
from vime.serving.http import EngineError, HttpServer, Refused
from vime.serving.process import ReservedPort, ServerProcess

if TYPE_CHECKING:
    from vime.config import Config

POLL_S = 0.1
START_TIMEOUT_S = 60.0  # the engines are healthy before; the router itself is up in about a second
ADD_TIMEOUT_S = 30.0  # it asks the engine whether it is healthy
DEREGISTER_TIMEOUT_S = 2.0


class RouterServer:
    """The address to which all generation requests go.

    Args:
        flags: the router's flags, by attribute name; they win over defaults of ours.
        external: (host, port) of a router which runs already; this object then only adds and removes engines there.
        request_timeout_s: how long the router waits for an engine's answer.
        reports_failures: it does not send a request again that failed with its engine; whoever asked does, who knows
            better when another engine can take it.
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
        reports_failures: bool = False,
    ) -> None:
        self._flags = dict(flags or {})
        self._external = external
        self._host = host
        self._port = port
        self._log = log_dir / "router.log"
        self._restarts = 0
        self._request_timeout_s = request_timeout_s
        self._reports_failures = reports_failures
        self._reserved: list[ReservedPort] = []
        self._process: ServerProcess | None = None
        self._engine_urls: list[str] = []  # those that it has, or is to have
        self._hosts: set[str] = set()  # of all engines that it ever had: one that is gone may come back
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
            reports_failures=config.sampling.use_fault_tolerance,
        )

    async def start(self, engine_urls: Sequence[str]) -> str:
        """Puts the engines, which must be healthy, behind the router and returns its URL once it sees all of them.

        Raises:
            UserError: the port is in use.
            EngineError: the router ended or is unreachable, or does not find the engines healthy in time.
        """
        self._engine_urls = list(engine_urls)
        self._hosts.update(map(_host, engine_urls))
        if not self._external:
            self._reserve()
            self._launch(self._engine_urls)
        try:
            async with self._client() as router:
                await self._until_all_are_healthy(router)
        except BaseException:
            self.stop()
            raise
        return self.url

    async def _until_all_are_healthy(self, router: HttpServer) -> None:
        missing = self._engine_urls
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                if self._external:
                    await self._register(router)
                while missing := await self._not_healthy(router):  # noqa: ASYNC110  another process sets no event
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise EngineError(f"{router} did not find these engines healthy: {', '.join(missing)}") from None

    async def check(self, timeout_s: float) -> None:
        """Asks our router for its engines; somebody else's is somebody else's to look after.

        Raises:
            EngineError: it does not answer within ``timeout_s``.
        """
        if not self._external:
            async with self._client() as router:
                await self._workers(router, timeout_s)

    async def restart(self) -> list[str]:
        """Starts our router again, after it ended or while it hangs, on its port and with the engines that it should
        have.

        Returns:
            The engines that it did not find healthy within half a minute; it does not have them.

        Raises:
            EngineError: it does not start.
        """
        assert self._process is not None, "somebody else's router is somebody else's to restart"
        await asyncio.to_thread(self._process.stop)
        self._restarts += 1
        self._log = self._log.with_name(f"router_restart_{self._restarts}.log")
        self._launch(())  # with engines it would wait for all of them, also for one that is gone by now
        urls = list(self._engine_urls)
        try:
            async with self._client() as router:
                await self._until_up(router)
                taken = await asyncio.gather(*(self._takes(router, url) for url in urls))
        except BaseException:
            await asyncio.to_thread(self._process.stop)
            raise
        refused = [url for url, is_taken in zip(urls, taken, strict=True) if not is_taken]
        self._engine_urls = [url for url in self._engine_urls if url not in refused]
        return refused

    async def _until_up(self, router: HttpServer) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while await self._workers_if_up(router) is None:  # noqa: ASYNC110  another process sets no event
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise EngineError(f"{router} did not start within {START_TIMEOUT_S:g} s") from None

    async def _takes(self, router: HttpServer, url: str) -> bool:
        try:
            await self._add(router, url)
        except EngineError:
            return False
        return True

    async def add(self, url: str) -> None:
        """Has requests sent to a healthy engine; nothing happens if it has it already.

        Raises:
            EngineError: it cannot be reached, or does not find the engine healthy.
        """
        if url in self._engine_urls:
            return
        self._hosts.add(_host(url))
        self._engine_urls.append(url)  # a router that is restarted meanwhile gets it too
        try:
            async with self._client() as router:
                await self._add(router, url)
        except BaseException:
            self._engine_urls = [each for each in self._engine_urls if each != url]
            raise

    async def _add(self, router: HttpServer, url: str) -> None:
        try:
            await router.call("POST", "/workers", {"url": url}, timeout_s=ADD_TIMEOUT_S)
        except Refused as error:
            if "already exists" not in str(error):
                raise

    async def remove(self, url: str) -> None:
        """Has no more requests sent to an engine; those in flight end with it. Never raises."""
        if url in self._engine_urls:
            self._engine_urls.remove(url)
            await asyncio.to_thread(self._deregister, url)

    async def ended(self) -> str:
        """Waits until our router ends and returns its last words; for ever if it is somebody else's."""
        while (words := self.failure()) is None:  # noqa: ASYNC110  another process sets no event
            await asyncio.sleep(POLL_S)
        return words

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[HttpServer]:
        router = HttpServer("the router", self.url)
        try:
            yield router
        finally:
            await router.close()

    def _reserve(self) -> None:
        port = ReservedPort(self._host, self._port, flag="--vllm-router-port")
        self._metrics_port = ReservedPort(LOOPBACK)
        self._reserved = [port, self._metrics_port]
        self._port = port.number
        self.url = f"http://{self._host}:{port.number}"

    def _launch(self, engine_urls: Sequence[str]) -> None:
        defaults = {
            "policy": "consistent_hash",  # a session stays on the engine that has its keys and values cached
            "request_timeout_secs": int(self._request_timeout_s) + 1,
            "worker_startup_timeout_secs": int(START_TIMEOUT_S),
            "worker_startup_check_interval": 1,
            "log_level": "warning",
        }
        if self._reports_failures:
            defaults["disable_retries"] = True
        owned = {
            "host": self._host,
            "port": self._port,
            "prometheus_port": self._metrics_port.number,
            "worker_urls": list(engine_urls),
        }
        words = command_words("router", defaults | self._flags | owned)
        command = [sys.executable, "-m", "vllm_router.launch_router", *words]
        self._process = ServerProcess("the router", command, log=self._log, environment=_no_proxy(self._hosts))

    async def _register(self, router: HttpServer) -> None:
        known = await self._workers(router)
        for url in self._engine_urls:
            if url not in known:
                await router.call("POST", "/workers", {"url": url}, timeout_s=START_TIMEOUT_S)

    async def _not_healthy(self, router: HttpServer) -> list[str]:
        workers = await self._workers_if_up(router)
        if workers is None:
            return ["(the router does not answer yet)"]
        return [url for url in self._engine_urls if not workers.get(url, False)]

    async def _workers_if_up(self, router: HttpServer) -> dict[str, bool] | None:
        """None while our router starts. Raises EngineError if it has ended, or somebody else's does not answer."""
        failure = self.failure()
        if failure is not None:
            raise EngineError(failure)
        try:
            return await self._workers(router)
        except EngineError:
            if self._external:
                raise
            return None

    async def _workers(self, router: HttpServer, timeout_s: float = 10.0) -> dict[str, bool]:
        """URL → whether the router holds it to be healthy."""
        answer = await router.call("GET", "/workers", timeout_s=timeout_s)
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


def _host(url: str) -> str:
    return urllib.parse.urlsplit(url).hostname or ""


def _no_proxy(engine_hosts: Set[str]) -> dict[str, str]:
    """The router would send requests for engines through a proxy that the environment names for the internet."""
    hosts = {LOOPBACK, "localhost", *engine_hosts}
    value = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), *sorted(hosts)]))
    return {"NO_PROXY": value, "no_proxy": value}
