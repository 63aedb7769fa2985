"""A sandbox for other machines: ``python -m vime.sandbox.server``. It runs whatever it is sent."""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import json
import os
from collections.abc import Sequence

from aiohttp import web

from vime.sandbox.local import LocalSandbox
from vime.sandbox.remote import TOKEN_VARIABLE
from vime.sandbox.types import Sandbox, SandboxError
from vime.sandbox.wire import job_from_json, result_to_json

_MAX_REQUEST_BYTES = 256 << 20


def application(sandbox: Sandbox, token: str | None = None) -> web.Application:
    """``POST /run`` and ``GET /health``. With a token every request must carry it."""

    async def run(request: web.Request) -> web.Response:
        if token and not hmac.compare_digest(request.headers.get("Authorization", ""), f"Bearer {token}"):
            return web.json_response({"error": f"the bearer token is not that of {TOKEN_VARIABLE}"}, status=401)
        try:
            job = job_from_json(json.loads(await request.read()))
            result = await sandbox.run(job.files, job.command, job.stdin, job.limits)
        except ValueError as error:
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
    parser.add_argument("--isolation", default="namespaces", help="auto, namespaces, user_namespaces or process.")
    parser.add_argument("--concurrency", type=int, default=None, help="Commands at one time; one a core.")
    arguments = parser.parse_args(argv)
    token = os.environ.get(TOKEN_VARIABLE)
    if not token and not ipaddress.ip_address(arguments.host).is_loopback:
        parser.error(f"--host {arguments.host} lets others run code here: set a secret in {TOKEN_VARIABLE}")
    sandbox = LocalSandbox(arguments.isolation, concurrency=arguments.concurrency)
    web.run_app(application(sandbox, token), host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
