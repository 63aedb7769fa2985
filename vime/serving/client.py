"""Generation through the router: token ids in, token ids and their log-probs out."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vime.models.routes import RouteShape
from vime.serving import answers
from vime.serving.control import EngineControl, parse_version
from vime.serving.fleet import Fleet
from vime.serving.http import EngineError, HttpServer, Refused, Unreachable, back_off, is_final
from vime.types import Generation, SamplingParams, WeightVersion

__all__ = ["EngineError", "RouterClient", "parse_generation", "request_body"]

ABORT_PERIOD_S = 0.2
ABORT_TIMEOUT_S = 60.0
ABORT_CALL_TIMEOUT_S = 20.0  # of one engine; when it is lost, its requests still have time to end with it
ENGINE_ID_PREFIX = "generate-tokens-"  # vLLM puts it before the id that a request came with
REPLAY = "--use-rollout-routing-replay"
FINISH_REASONS = ("stop", "length", "abort")
NOTHING = Generation(token_ids=[], log_probs=[], weight_versions=[], finish_reason="abort")


class Aborted(EngineError):
    """An engine ended a request that nobody here wanted to end: it is given up."""


class RouterClient:
    """Implements ``ports.Generator`` over the router, or over one engine if given its URL.

    A request is tried again only when nobody answered or a server failed (5xx), and within its one deadline. A repeated
    request samples the same tokens, because its seed is part of it.

    Args:
        engines: where ``abort`` goes; the router knows no such call. Where they are a fleet that tolerates the loss of
            engines, requests wait while none serves, which does not count against their deadline.
        request_timeout_s: deadline of one generation, all attempts together.
        routes: what routes of the served model look like; None: as the engines tell them.
    """

    def __init__(
        self,
        url: str,
        engines: Fleet | Sequence[EngineControl] = (),
        *,
        request_timeout_s: float = 1800.0,
        routes: RouteShape | None = None,
    ) -> None:
        self._router = HttpServer("the router", url)
        self._fleet = engines if isinstance(engines, Fleet) else Fleet.of(engines)
        self._request_timeout_s = request_timeout_s
        self._routes = routes
        self._run = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._in_flight: set[str] = set()
        self._aborts = 0

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session_id: str) -> Generation:
        """Samples one continuation of ``token_ids``. Requests of one session reach the same engine.

        Raises:
            EngineError: no attempt was answered, the request is wrong (4xx), or the answer cannot be trained on; the
                message names the session and the request.
        """
        request_id = f"vime-{self._run}-{next(self._numbers)}"
        headers = {"accept": answers.MEDIA_TYPE, "x-session-id": session_id, "x-request-id": request_id}
        body = request_body(token_ids, params) | {"request_id": request_id}
        self._in_flight.add(ENGINE_ID_PREFIX + request_id)
        try:
            async with asyncio.timeout(self._request_timeout_s) as deadline:
                return await self._generation(body, headers, deadline)
        except TimeoutError:
            waited = f"{self._request_timeout_s:g} s"
            raise EngineError(
                f"{self._router} did not answer a request of session {session_id} within {waited}"
            ) from None
        finally:
            self._in_flight.discard(ENGINE_ID_PREFIX + request_id)

    async def _generation(
        self, body: dict[str, Any], headers: Mapping[str, str], deadline: asyncio.Timeout
    ) -> Generation:
        for attempt in itertools.count(1):
            await self._until_open(deadline)
            if self._aborts and not self._fleet.is_open:
                return NOTHING
            try:
                return await self._attempt(body, headers)
            except (Unreachable, Refused, Aborted) as error:
                if is_final(error, attempt):
                    raise
                if self._aborts and self._fleet.tolerant:
                    return NOTHING
            self._fleet.count("requests_repeated")
            await back_off(attempt)
        raise AssertionError("unreachable")

    async def _attempt(self, body: dict[str, Any], headers: Mapping[str, str]) -> Generation:
        answer = await self._router.call(
            "POST", answers.GENERATE, body, timeout_s=self._request_timeout_s, headers=headers, read=answers.decode
        )
        try:
            generation = parse_generation(answer)
            if wants_routes(body):  # megabytes to look at: others may talk to their engines meanwhile
                generation = await asyncio.to_thread(with_routes, generation, answer, body, self._routes)
        except EngineError as error:
            of = f"request {body['request_id']} of session {headers['x-session-id']}"
            raise EngineError(f"{self._router}, {of}: {error}") from None
        if generation.finish_reason == "abort" and self._fleet.tolerant and not self._aborts:
            raise Aborted(f"an engine that is given up ended request {body['request_id']}")
        return generation

    async def _until_open(self, deadline: asyncio.Timeout) -> None:
        """Waits for an engine that serves, or until requests are aborted."""
        if self._fleet.is_open or self._aborts:
            return
        clock = asyncio.get_running_loop().time
        end, begin = deadline.when(), clock()
        assert end is not None
        deadline.reschedule(None)
        await self._fleet.until(lambda: self._fleet.is_open or bool(self._aborts))
        deadline.reschedule(end + clock() - begin)

    async def abort(self) -> None:
        """Ends this client's requests in flight, and returns when each has answered with what it has.

        Requests may still be on their way to an engine, so the call is repeated until none is left.

        Raises:
            EngineError: some requests are left after a minute, or an engine fails. In a fleet that tolerates the loss
                of engines, those that fail are lost, and with them their requests.
        """
        self._aborts += 1
        self._fleet.wake()
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                while self._in_flight:
                    await self._fleet.each(self._abort_at)
                    await asyncio.sleep(ABORT_PERIOD_S)
        except TimeoutError:
            left = len(self._in_flight)
            raise EngineError(f"{left} requests did not end within {ABORT_TIMEOUT_S:g} s of being aborted") from None
        finally:
            self._aborts -= 1

    async def _abort_at(self, engine: EngineControl) -> None:
        await engine.abort(sorted(self._in_flight), timeout_s=ABORT_CALL_TIMEOUT_S)

    async def close(self) -> None:
        await self._router.close()


def request_body(token_ids: Sequence[int], params: SamplingParams) -> dict[str, Any]:
    """A request to ``/inference/v1/generate``. Every parameter is given, so that no server default matters.

    Whoever wants no routes asks for those behind the prompt: vLLM knows no other word for it, and an engine of ours
    then tells none.
    """
    start = params.routed_experts_prompt_start
    sampling = {
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "seed": params.seed,
        "logprobs": 0,  # of the sampled token alone
        "detokenize": bool(params.stop),  # text is needed to find stop strings, and for nothing else
        "skip_special_tokens": params.skip_special_tokens,
        "routed_experts_prompt_start": len(token_ids) if start is None else start,
    }
    return {"token_ids": list(token_ids), "sampling_params": sampling}


def parse_generation(answer: Any) -> Generation:
    """An engine's answer (``answers.Answer``).

    Raises:
        EngineError: it is something else, has a finish reason that we do not know, or a token without log-prob or
            version.
    """
    try:
        token_ids = answers.unpacked(answer["token_ids"], answers.TOKEN_DTYPE)
        log_probs = answers.unpacked(answer["log_probs"], answers.LOG_PROB_DTYPE)
        versions = _spread(answer["weight_versions"], len(token_ids))
        finish_reason = answer["finish_reason"]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"an engine's answer cannot be read ({error!r}): {str(answer)[:300]}") from None
    if finish_reason not in FINISH_REASONS:
        raise EngineError(f"an engine ended a request with {finish_reason!r}")
    if len(log_probs) != len(token_ids) or not np.isfinite(log_probs).all():
        raise EngineError("an engine sampled a token without a finite log-prob; its weights are probably not finite")
    return Generation(
        token_ids=token_ids.tolist(),
        log_probs=log_probs.tolist(),
        weight_versions=versions,
        finish_reason=finish_reason,
    )


def wants_routes(body: Mapping[str, Any]) -> bool:
    """Whether a request wants routes: then it lacks at least that of the last token of the prompt."""
    return bool(body["sampling_params"]["routed_experts_prompt_start"] < len(body["token_ids"]))


def with_routes(generation: Generation, answer: Any, body: Mapping[str, Any], shape: RouteShape | None) -> Generation:
    """With the routes in the answer to the request ``body``, which wants some.

    Raises:
        EngineError: they are missing, or not those of ``shape`` and of all tokens that they were wanted of.
    """
    if not generation.token_ids:
        return generation
    start = body["sampling_params"]["routed_experts_prompt_start"]
    count = len(body["token_ids"]) + len(generation.token_ids) - 1 - start
    routes = answer["routed_experts"]
    if routes is None:
        raise EngineError(f"{REPLAY}: an engine's answer has no routes, or not whole ones")
    try:
        routes = routes if shape is None else shape.checked(routes, count + 1)
    except ValueError as error:
        raise EngineError(f"{REPLAY}: the routes in an engine's answer {error}") from None
    if len(routes) != count:
        raise EngineError(f"{REPLAY}: an engine told the routes of {len(routes)} tokens, and {count} were wanted")
    return replace(generation, routed_experts=routes)


def _spread(spans: Sequence[Mapping[str, Any]], length: int) -> list[WeightVersion]:
    """Spans of tokens with one version each → one version a token. Spans leave no gaps."""
    versions: list[WeightVersion] = []
    for span in spans:
        versions += [parse_version(span["version"])] * (span["end"] - span["start"])
    if len(versions) != length:
        raise ValueError(f"weight versions of {len(versions)} tokens, not {length}")
    return versions
