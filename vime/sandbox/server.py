"""A sandbox for other machines: ``python -m vime.sandbox.server``. It runs whatever it is sent."""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import json
import os
import socket
from collections.abc import Sequence
from typing import get_args

from aiohttp import web

from vime.sandbox.local import Isolation, LocalSandbox
from vime.sandbox.remote import TOKEN_VARIABLE
from vime.sandbox.types import Sandbox, SandboxError
from vime.sandbox.wire import job_from_json, result_to_json

_MAX_REQUEST_BYTES = 256 << 20
_MAX_REQUESTS = 64
_SHUTDOWN_S = 1.0  # for code that runs when we are told to end; whoever sent it asks again


def application(sandbox: Sandbox, token: str | None = None, *, max_requests: int = _MAX_REQUESTS) -> web.Application:
    """``POST /run`` and ``GET /health``. With a token every request to run must carry it.

    Args:
        max_requests: that are held at one time, those that wait included; further ones are told to come again.
    """
    held = 0

    async def run(request: web.Request) -> web.Response:
        nonlocal held
        if token and not _same(request.headers.get("Authorization", ""), f"Bearer {token}"):
            return web.json_response({"error": f"the bearer token is not that of {TOKEN_VARIABLE}"}, status=401)
        if held >= max_requests:
            return web.json_response({"error": f"{held} requests are waiting: come again"}, status=503)
        held += 1
        try:
            return await answer(request)
        finally:
            held -= 1

    async def answer(request: web.Request) -> web.Response:
        try:
            job = job_from_json(json.loads(await request.read()))
            result = await sandbox.run(job.files, job.command, job.stdin, job.limits)
        except (ValueError, RecursionError) as error:
            return web.json_response({"error": str(error)}, status=400)
        except SandboxError as error:
            return web.json_response({"error": str(error)}, status=500)
        return web.json_response(result_to_json(result))

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application(client_max_size=_MAX_REQUEST_BYTES)
    app.add_routes([web.post("/run", run), web.get("/health", health)])
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Serves until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m vime.sandbox.server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="Where to listen; others than loopback need a token.")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--isolation", default="namespaces", choices=("auto", *get_args(Isolation)))
    parser.add_argument("--concurrency", type=_at_least_1, default=None, help="Commands at one time; one a core.")
    parser.add_argument(
        "--max-requests", type=_at_least_1, default=_MAX_REQUESTS, help="Held at one time; to further ones it is busy."
    )
    arguments = parser.parse_args(argv)
    token = os.environ.get(TOKEN_VARIABLE)
    if not token and not _is_loopback(arguments.host):
        parser.error(f"--host {arguments.host} lets others run code here: set a secret in {TOKEN_VARIABLE}")
    sandbox = LocalSandbox(arguments.isolation, concurrency=arguments.concurrency)
    app = application(sandbox, token, max_requests=arguments.max_requests)
    web.run_app(
        app,
        host=arguments.host,
        port=arguments.port,
        handler_cancellation=True,  # nobody waits for the result
        shutdown_timeout=_SHUTDOWN_S,
    )


def _same(given: str, wanted: str) -> bool:
    """In a time that tells nothing of where they differ. Headers hold whatever bytes the client sent."""
    return hmac.compare_digest(*(each.encode(errors="surrogateescape") for each in (given, wanted)))


def _is_loopback(host: str) -> bool:
    """Whether nobody else can reach it, by whatever name."""
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def _at_least_1(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


if __name__ == "__main__":
    main()
