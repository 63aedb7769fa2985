"""The remote sandbox, against a real server with a real sandbox behind it."""

import asyncio
import contextlib
import functools
import os
import subprocess
import sys
import time

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.sandbox.test_local import left_over
from vime.platform.sockets import free_port
from vime.sandbox import Limits, LocalSandbox, Outcome, RemoteSandbox, Result, SandboxError
from vime.sandbox.server import application
from vime.sandbox.wire import job_from_json


@contextlib.asynccontextmanager
async def remote(app, **options):
    async with TestServer(app) as server:
        client = RemoteSandbox(str(server.make_url("/")), **options)
        try:
            yield client
        finally:
            await client.close()


def answering(*answers):
    """A service that gives one answer after the other, and the last for ever."""
    left = list(answers)

    async def run(request):
        status, text = left.pop(0) if len(left) > 1 else left[0]
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_post("/run", run)
    return app


GOOD = '{"stdout": "1", "stderr": "", "status": "exited", "exit_code": 0, "seconds": 0.5}'


async def test_files_input_output_and_exit_code_travel_unchanged():
    files = {"main.py": "import sys\nprint(len(open('b', 'rb').read()), input())\nsys.exit(3)", "b": b"\xff\x00"}
    async with remote(application(LocalSandbox())) as where:
        result = await where.run(files, ["python3", "main.py"], "zwölf")
    assert (result.stdout, result.exit_code, result.status) == ("2 zwölf\n", 3, Outcome.EXITED)


async def test_limits_hold_over_there():
    async with remote(application(LocalSandbox())) as where:
        result = await where.run({}, ["sleep", "60"], limits=Limits(wall_s=0.3))
    assert result.status is Outcome.TIMEOUT


async def test_a_service_that_is_busy_is_asked_again():
    async with remote(answering((503, ""), (429, ""), (200, GOOD))) as where:
        assert (await where.run({}, ["true"])).stdout == "1"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((500, '{"error": "no fork"}'), 'answered 500: {"error": "no fork"}'),
        ((200, "<html>"), "something else than a result"),
        ((200, "[]"), "something else than a result"),
        ((200, GOOD.replace("exited", "odd")), "something else than a result"),
    ],
)
async def test_what_is_no_result_is_an_error_of_the_sandbox(answer, message):
    async with remote(answering(answer)) as where:
        with pytest.raises(SandboxError) as error:
            await where.run({}, ["true"])
    assert message in str(error.value)


async def test_nobody_waits_longer_than_the_deadline():
    async def never(request):
        await asyncio.sleep(60)

    app = web.Application()
    app.router.add_post("/run", never)
    start = time.monotonic()
    async with remote(app, waiting_s=0.2) as where:
        with pytest.raises(SandboxError, match=r"no result within 0\.5 s: no answer"):
            await where.run({}, ["true"], limits=Limits(wall_s=0.3))
        assert time.monotonic() - start < 3


async def test_a_service_that_cannot_be_reached_is_named():
    where = RemoteSandbox("http://127.0.0.1:9", waiting_s=0.2)
    with pytest.raises(SandboxError, match=r"127\.0\.0\.1:9/run: no result within .* ClientConnectorError"):
        await where.run({}, ["true"], limits=Limits(wall_s=0.1))
    await where.close()


async def test_a_token_is_asked_for():
    app = application(LocalSandbox(), token="swordfish")
    async with remote(app, token="swordfish") as where:
        assert (await where.run({}, ["true"])).ok
    async with remote(application(LocalSandbox(), token="swordfish")) as where:
        with pytest.raises(SandboxError, match="answered 401"):
            await where.run({}, ["true"])


async def test_a_token_that_is_no_ascii_is_a_wrong_one():
    async with remote(application(LocalSandbox(), token="swordfish"), token="schwertfisch\u00fc") as where:
        with pytest.raises(SandboxError, match="answered 401"):
            await where.run({}, ["true"])


async def test_a_service_that_holds_enough_requests_is_busy_until_one_ends():
    release, entered = asyncio.Event(), 0

    class Slow:
        async def run(self, *job):
            nonlocal entered
            entered += 1
            await release.wait()
            return Result(stdout="1", stderr="", status=Outcome.EXITED, exit_code=0)

    async with TestServer(application(Slow(), max_requests=2)) as server, aiohttp.ClientSession() as http:
        post = functools.partial(http.post, server.make_url("/run"), json={"command": ["true"]})
        held = [asyncio.create_task(post()) for _ in range(2)]
        async with asyncio.timeout(20):
            while entered < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await post()).status == 503
        release.set()
        assert [(await each).status for each in held] == [200, 200]
        assert (await post()).status == 200


@contextlib.asynccontextmanager
async def served():
    """A server in a process of its own, and a client of it."""
    port = free_port()
    command = [sys.executable, "-m", "vime.sandbox.server", "--host", "localhost", "--port", str(port)]
    server = await asyncio.create_subprocess_exec(*command, "--isolation", "auto", stdout=subprocess.DEVNULL)
    where = RemoteSandbox(f"http://localhost:{port}", waiting_s=60)
    try:
        yield server, where
    finally:
        await where.close()
        if server.returncode is None:
            server.terminate()
        await server.wait()


def sleeps(where, marker):
    return asyncio.create_task(where.run({}, ["sh", "-c", f"sleep 60; : {marker}"], limits=Limits(wall_s=60)))


async def test_code_that_nobody_waits_for_is_ended_and_the_host_may_be_a_name():
    marker = f"vime_abandoned_{os.getpid()}"
    async with served() as (_, where):
        running = sleeps(where, marker)
        assert await comes_true(lambda: left_over(marker))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert await comes_true(lambda: not left_over(marker))


async def test_a_server_that_is_told_to_end_does_not_wait_for_code_that_still_runs():
    marker = f"vime_ended_{os.getpid()}"
    async with served() as (server, where):
        running = sleeps(where, marker)
        assert await comes_true(lambda: left_over(marker))
        server.terminate()
        async with asyncio.timeout(20):
            await server.wait()
        assert not left_over(marker)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def comes_true(condition):
    for _ in range(400):
        if condition():
            return True
        await asyncio.sleep(0.05)
    return False


def test_the_server_does_not_listen_for_others_without_a_token():
    command = [sys.executable, "-m", "vime.sandbox.server", "--host", "0.0.0.0"]
    environment = {name: value for name, value in os.environ.items() if name != "VIME_SANDBOX_TOKEN"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert ended.returncode == 2
    assert "set a secret in VIME_SANDBOX_TOKEN" in ended.stderr


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ([], "a request is an object"),
        ({"command": "ls"}, "list of strings"),
        ({"command": []}, "at least one word"),
        ({"command": ["ls"], "files": {"/etc/passwd": ""}}, "relative path"),
        ({"command": ["ls"], "files": {"a": 1}}, "a content is a string"),
        ({"command": ["ls"], "limits": {"walls": 1}}, "limits are an object with some of"),
        ({"command": ["ls"], "limits": {"wall_s": "1"}}, "a number above 0 and at most 1,000,000,000, not wall_s='1'"),
        ({"command": ["ls"], "limits": {"wall_s": -1}}, "not wall_s=-1"),
        ({"command": ["ls"], "limits": {"wall_s": 10**400}}, "not wall_s=1000"),
        ({"command": ["ls"], "limits": {"memory_bytes": 10**400}}, "not memory_bytes=1000"),
        ({"command": ["ls"], "limits": {"memory_bytes": 1.5}}, "a whole number above 0"),
        ({"command": ["ls"], "limits": {"memory_bytes": float("inf")}}, "a whole number above 0"),
        ({"command": ["ls"], "limits": {"memory_bytes": True}}, "a whole number above 0"),
        ({"command": ["ls"], "stdin": {"base64": "?"}}, "base64"),
    ],
)
def test_a_request_that_is_none_is_refused_with_one_line(request_, message):
    with pytest.raises(ValueError, match=message) as error:
        job_from_json(request_)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("limit", ["9" * 400, "1e400", "-1", "true", "NaN"])
async def test_the_server_refuses_limits_that_cannot_be_kept(limit):
    body = '{"command": ["true"], "limits": {"wall_s": %s}}' % limit  # noqa: UP031  braces
    async with (
        TestServer(application(LocalSandbox("process"))) as server,
        aiohttp.ClientSession() as session,
        session.post(server.make_url("/run"), data=body) as answer,
    ):
        assert (answer.status, "not wall_s=" in (await answer.json())["error"]) == (400, True)
