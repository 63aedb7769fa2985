"""Control calls to one engine. They go to the engine itself: a router would pass them on to any one of its engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from vime.serving import answers
from vime.serving.http import HttpServer
from vime.types import WeightVersion

CALL_TIMEOUT_S = 60.0
FIRST_VERSION = "default"  # what vLLM calls the weights that it started with


class EngineControl:
    """The verbs of one engine. Every method raises EngineError, naming the engine and the call.

    ``dead`` is why the engine must not be used any more, or None. A sync that fails half-way sets it.
    """

    def __init__(self, url: str, name: str | None = None) -> None:
        self._server = HttpServer(name or "the engine", url)
        self.dead: str | None = None

    def __str__(self) -> str:
        return str(self._server)

    @property
    def url(self) -> str:
        return self._server.url

    async def pause(
        self, mode: Literal["keep", "abort", "wait"] = "keep", *, timeout_s: float = CALL_TIMEOUT_S
    ) -> None:
        """Stops generation. "keep" freezes running requests until ``resume``; new requests queue in any mode."""
        await self._post(f"/pause?mode={mode}", timeout_s=timeout_s)

    async def resume(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        await self._post("/resume", timeout_s=timeout_s)

    async def sleep(self, level: Literal[1, 2], *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Frees the device memory. Keys and values are lost; weights go to the host (level 1) or are lost too (2)."""
        await self._post(f"/sleep?level={level}", timeout_s=timeout_s)

    async def wake_up(self, *tags: Literal["weights", "kv_cache"], timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Takes the memory again; without tags, all of it."""
        query = "&".join(f"tags={tag}" for tag in tags)
        await self._post(f"/wake_up?{query}" if query else "/wake_up", timeout_s=timeout_s)

    async def is_paused(self, *, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        answer = await self._server.call("GET", "/is_paused", timeout_s=timeout_s)
        return bool(answer["is_paused"])

    async def reset_prefix_cache(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Forgets all keys and values, those of running requests too: they are computed again under the new weights."""
        await self._post("/reset_prefix_cache?reset_running_requests=true", timeout_s=timeout_s)

    async def announce(self, init_info: Mapping[str, Any], *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Tells the engine what weight updates will carry, and how (see ``serving.transfer.InitInfo``).

        It refuses a plan that does not fit its model, and returns when its processes have joined the group, if any.
        """
        await self._post("/init_weight_transfer_engine", {"init_info": dict(init_info)}, timeout_s=timeout_s)

    async def world_size(self, *, timeout_s: float = CALL_TIMEOUT_S) -> int:
        """How many processes have a part of the model."""
        answer = await self._server.call("GET", "/get_world_size", timeout_s=timeout_s)
        return int(answer["world_size"])

    async def start_update(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        await self._post("/start_weight_update", timeout_s=timeout_s)

    async def update(self, update_info: dict[str, Any], *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Makes the engine load the tensors that ``update_info`` describes (see ``serving.transfer.UpdateInfo``)."""
        await self._post("/update_weights", {"update_info": update_info}, timeout_s=timeout_s)

    async def finish_update(self, version: WeightVersion, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Ends the update: from now on the engine marks its tokens with ``version``."""
        await self._post("/finish_weight_update", {"weight_version": str(version)}, timeout_s=timeout_s)

    async def weight_version(self, *, timeout_s: float = CALL_TIMEOUT_S) -> WeightVersion:
        answer = await self._server.call("GET", "/weight_info", timeout_s=timeout_s)
        return parse_version(answer["weight_version"])

    async def abort(self, request_ids: Sequence[str], *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Ends these requests; ids which the engine does not know are ignored. Each answers with what it has."""
        if request_ids:
            await self._post("/abort_requests", {"request_ids": list(request_ids)}, timeout_s=timeout_s)

    async def abort_all(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        await self._post("/abort_requests", {}, timeout_s=timeout_s)

    async def health(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Whether the server's process and its workers live; see ``serving.health`` for whether it still generates."""
        await self._server.call("GET", "/health", timeout_s=timeout_s)

    async def generate(self, body: dict[str, Any], *, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        """One request to this engine, past the router; for probes."""
        headers = {"accept": answers.MEDIA_TYPE}
        answer: dict[str, Any] = await self._server.call(
            "POST", answers.GENERATE, body, timeout_s=timeout_s, headers=headers, read=answers.decode
        )
        return answer

    async def progress(self, *, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        """What an API server of the engine knows of its requests; see ``serving.health.Progress``."""
        answer: dict[str, Any] = await self._server.call("GET", answers.PROGRESS, timeout_s=timeout_s)
        return answer

    async def close(self) -> None:
        await self._server.close()

    async def _post(self, path: str, body: Any = None, *, timeout_s: float) -> None:
        await self._server.call("POST", path, body, timeout_s=timeout_s)


def parse_version(name: str) -> WeightVersion:
    """vLLM's name of a weight version → its number; 0 is what the engine started with."""
    return 0 if name == FIRST_VERSION else int(name)
