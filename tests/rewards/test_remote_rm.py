"""The reward service's client, against a server on loopback."""

import asyncio
import contextlib
import types

import pytest
from aiohttp import web

from tests.config.conftest import flags, model_dir, prompt_file  # noqa: F401
from vime.config import parse_config
from vime.plugins import resolve_hooks
from vime.rewards.hub import RewardHub
from vime.rewards.remote_rm import RemoteReward
from vime.rewards.values import RewardFailed
from vime.rollout.build import make_hub

from .test_hub import FakePool, Settings, rewarded, sample


@contextlib.asynccontextmanager
async def service(answer, **options):
    """A service whose answers ``answer(number of the request, body)`` makes; yields (client, bodies received)."""
    bodies = []

    async def handle(request):
        bodies.append(await request.json())
        return await answer(len(bodies), bodies[-1])

    app = web.Application()
    app.router.add_post("/reward", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    client = RemoteReward(f"http://127.0.0.1:{port}/reward", backoff_s=0.001, **options)
    try:
        yield client, bodies
    finally:
        await client.close()
        await runner.cleanup()


async def test_the_reward_of_prompt_response_and_label():
    async def answer(number, body):
        return web.json_response(0.75)

    async with service(answer) as (client, bodies):
        one = sample(prompt=[{"role": "user", "content": "q"}])
        await rewarded(RewardHub(Settings("remote_rm"), FakePool(), remote=client), one)
        assert one.reward == 0.75
        assert bodies == [{"prompt": [{"role": "user", "content": "q"}], "response": "r", "label": "l"}]


async def test_the_prefix_boxed_sends_the_content_of_the_box():
    async def answer(number, body):
        return web.json_response(1)

    async with service(answer) as (client, bodies):
        hub = RewardHub(Settings("boxed_remote_rm"), FakePool(), remote=client)
        await rewarded(hub, sample(response=r"so \boxed{5}"))
        assert bodies[0]["response"] == "5"


async def test_server_errors_are_tried_again():
    async def answer(number, body):
        return web.json_response(1.0) if number == 3 else web.Response(status=503)

    async with service(answer) as (client, bodies):
        assert await client.ask("p", "r", None) == 1.0
        assert len(bodies) == 3


async def test_ten_server_errors_are_enough():
    async def answer(number, body):
        return web.Response(status=500, text="out of\nmemory")

    async with service(answer) as (client, bodies):
        with pytest.raises(RewardFailed, match=r"answered 500: out of memory \(10 tries\)"):
            await client.ask("p", "r", None)
        assert len(bodies) == 10


async def test_a_client_error_is_never_tried_again():
    async def answer(number, body):
        return web.Response(status=422, text="no label")

    async with service(answer) as (client, bodies):
        with pytest.raises(RewardFailed, match="answered 422: no label"):
            await client.ask("p", "r", None)
        assert len(bodies) == 1


async def test_no_answer_in_time_is_a_failure():
    async def answer(number, body):
        await asyncio.sleep(1)

    async with service(answer, timeout_s=0.05) as (client, _):
        with pytest.raises(RewardFailed, match=r"no answer within 0\.05 s"):
            await client.ask("p", "r", None)


@contextlib.asynccontextmanager
async def hub_of(words):
    """The hub of a run with these flags."""
    config = parse_config(words)
    hub = make_hub(config, types.SimpleNamespace(hooks=resolve_hooks(config)), config.args, FakePool())
    try:
        yield hub
    finally:
        await hub.close()


async def test_rm_timeout_s_is_the_time_of_one_try(flags):  # noqa: F811
    async def answer(number, body):
        await asyncio.sleep(1)
        return web.json_response(1.0)

    async with service(answer) as (client, bodies):
        words = f"--rm-type remote_rm --rm-url {client._url} --rm-timeout-s 0.05"
        async with hub_of(flags(*words.split())) as hub:
            one = await rewarded(hub)
        assert one.grade.detail.startswith(f"remote_rm: reward service {client._url} no answer within 0.05 s")
        assert len(bodies) <= 1, "a try that ran out of time is the last"


async def test_a_service_has_two_minutes_where_nothing_is_said(flags):  # noqa: F811
    async with hub_of(flags("--rm-type", "remote_rm", "--rm-url", "http://127.0.0.1:9/reward")) as hub:
        assert hub._remote._timeout_s == 120


async def test_nobody_there():
    client = RemoteReward("http://127.0.0.1:9/reward", tries=2, backoff_s=0.001)
    with pytest.raises(RewardFailed, match=r"ClientConnectorError.*\(2 tries\)"):
        await client.ask("p", "r", None)
    await client.close()


@pytest.mark.parametrize(
    ("text", "what"), [("oops", "answered no JSON: oops"), ('"1"', "must be a number, not '1'"), ("NaN", "finite")]
)
async def test_what_is_no_number_is_an_error(text, what):
    async def answer(number, body):
        return web.Response(text=text)

    async with service(answer) as (client, _):
        one = await rewarded(RewardHub(Settings("remote_rm"), FakePool(), remote=client))
        assert what in one.grade.detail
        assert one.reward is None


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000])
async def test_an_answer_that_json_cannot_read_is_the_sample_s_failure(text):
    async def answer(number, body):
        return web.Response(text=text)

    async with service(answer) as (client, _):
        one = await rewarded(RewardHub(Settings("remote_rm"), FakePool(), remote=client))
        assert "answered no JSON" in one.grade.detail


@pytest.mark.parametrize("host", ["h" * 300, "h" * 64 + ".example", "[::"])
async def test_a_host_that_is_none_is_the_sample_s_failure(host):
    hub = RewardHub(Settings("remote_rm", rm_url=f"http://{host}/reward"), FakePool())
    hub._remote._tries = 1
    one = await rewarded(hub)
    await hub.close()
    assert one.grade.detail.startswith(f"remote_rm: reward service http://{host[:60]}")


async def test_a_prompt_that_json_cannot_hold_is_the_sample_s_failure():
    async with service(None) as (client, bodies):
        one = await rewarded(RewardHub(Settings("remote_rm"), FakePool(), remote=client), sample(prompt={1, 2}))
        assert "the prompt is nothing that JSON can hold" in one.grade.detail and not bodies
