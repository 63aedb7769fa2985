"""What an engine answers: the tokens and log-probs that training relies on."""

from __future__ import annotations

import asyncio
import inspect
import random
from dataclasses import replace

import aiohttp
import pytest

from tests.serving.conftest import SAMPLED, TOLERANCE, Served, generating, largest_difference, reference
from tests.tiny import make_tokenizer
from vime.serving.client import EngineError, RouterClient
from vime.serving.control import EngineControl
from vime.serving.health import Progress, check_generates
from vime.types import Generation, SamplingParams

PROMPT = [7, 80, 90, 100, 110]


def prompts(count: int) -> list[list[int]]:
    numbers = random.Random(0)
    return [[numbers.randrange(3, 500) for _ in range(numbers.randrange(5, 80))] for _ in range(count)]


async def generate_all(client: RouterClient, order: list[int]) -> dict[int, Generation]:
    """Prompt i is sampled with seed i; all are submitted at once, in the given order."""
    texts = prompts(len(order))

    async def one(i: int) -> tuple[int, Generation]:
        return i, await client.generate(texts[i], replace(SAMPLED, seed=i), session_id=f"s{i}")

    return dict(await asyncio.gather(*map(one, order)))


async def test_96_seeded_prompts_at_once_get_the_log_probs_of_transformers(
    client: RouterClient, tied_engine: Served
) -> None:
    answers = await generate_all(client, list(range(96)))
    assert all(
        len(answer.token_ids) == len(answer.weight_versions) == SAMPLED.max_tokens for answer in answers.values()
    )
    weights = tied_engine.weights
    for i in (0, 31, 95):
        expected = reference(tied_engine.folder, weights, prompts(96)[i], answers[i].token_ids)
        assert largest_difference(answers[i], expected) < TOLERANCE


async def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(client: RouterClient) -> None:
    forward = await generate_all(client, list(range(32)))
    backward = await generate_all(client, list(range(31, -1, -1)))
    assert {i: a.token_ids for i, a in forward.items()} == {i: a.token_ids for i, a in backward.items()}


async def test_log_probs_are_those_of_the_distribution_after_the_temperature(
    client: RouterClient, tied_engine: Served
) -> None:
    answer = await client.generate(PROMPT, replace(SAMPLED, temperature=0.7, seed=1), session_id="a")
    expected = reference(tied_engine.folder, tied_engine.weights, PROMPT, answer.token_ids, temperature=0.7)
    assert largest_difference(answer, expected) < TOLERANCE


async def test_a_response_ends_with_the_stop_token_in_it(client: RouterClient) -> None:
    free = await client.generate(PROMPT, replace(SAMPLED, seed=3), session_id="a")
    stop = free.token_ids[5]
    stopped = await client.generate(PROMPT, replace(SAMPLED, seed=3, stop_token_ids=(stop,)), session_id="a")
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert free.finish_reason == "length"


async def test_a_stop_text_ends_a_response(client: RouterClient) -> None:
    free = await client.generate(PROMPT, replace(SAMPLED, seed=4), session_id="a")
    text = make_tokenizer().decode(free.token_ids)
    stopped = await client.generate(PROMPT, replace(SAMPLED, seed=4, stop=(text[3:6],)), session_id="a")
    assert stopped.finish_reason == "stop"
    assert len(stopped.token_ids) < len(free.token_ids)
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]


async def test_an_aborted_request_returns_what_it_has(client: RouterClient, control: EngineControl) -> None:
    params = SamplingParams(max_tokens=480, seed=0, ignore_eos=True)
    tasks = [asyncio.create_task(client.generate(PROMPT, params, session_id=f"s{i}")) for i in range(8)]
    await generating(control.url, 8)
    await client.abort()
    answers = [task.result() for task in tasks]  # abort returns only when all have answered
    assert {answer.finish_reason for answer in answers} == {"abort"}
    assert any(0 < len(answer.token_ids) < 480 for answer in answers)


async def test_a_wrong_request_is_refused_at_once_with_the_engines_words(client: RouterClient) -> None:
    with pytest.raises(
        EngineError, match=r"the router \(http://.*\) answered /inference/v1/generate with 400: .*temperature"
    ):
        await client.generate(PROMPT, replace(SAMPLED, temperature=-1.0), session_id="a")


async def test_a_request_that_is_not_answered_in_time_names_who_was_waited_for(
    client: RouterClient, control: EngineControl
) -> None:
    hurried = RouterClient(control.url, [control], request_timeout_s=2)
    await control.pause("keep")
    try:
        with pytest.raises(EngineError, match=r"did not answer .* within 2 s"):
            await hurried.generate(PROMPT, SAMPLED, session_id="a")
        with pytest.raises(
            EngineError, match=r"engine 0 \(http://.*\) did not answer /inference/v1/generate within 2 s"
        ):
            await check_generates(control, timeout_s=2)  # which is what an engine that no longer decodes looks like
    finally:
        await control.resume()
        await hurried.close()
    await check_generates(control, timeout_s=60)


async def test_a_pause_takes_no_longer_than_the_engine_needs_for_it(control: EngineControl) -> None:
    """vLLM's own route sleeps 20 ms when the engine stands still; where it no longer does, we need none of ours."""
    from vllm.v1.engine.async_llm import AsyncLLM

    assert "asyncio.sleep(0.02)" in inspect.getsource(AsyncLLM.pause_generation)
    clock = asyncio.get_running_loop().time
    ours_s, vllms_s = list[float](), list[float]()
    for _ in range(10):  # in turn, so that a busy machine delays both
        for mode, paused_s in (("keep", ours_s), ("wait", vllms_s)):
            begin = clock()
            await control.pause(mode)
            paused_s.append(clock() - begin)
            assert await control.is_paused()
            await control.resume()
    assert min(ours_s) + 0.01 < min(vllms_s)


async def test_a_pause_takes_what_that_of_vllm_takes(control: EngineControl) -> None:
    async with aiohttp.ClientSession() as session:

        async def said(query: str) -> tuple[int, str]:
            async with session.post(f"{control.url}/pause?{query}") as answer:
                return answer.status, await answer.text()

        try:
            for query in ("mode=keep&clear_cache=false", "mode=wait&clear_cache=false", "mode=abort", "mode=keep"):
                assert await said(query) == (200, '{"status":"paused"}')
            for query, wrong in (("mode=freeze", "mode"), ("clear_cache=perhaps", "clear_cache")):
                status, text = await said(query)
                assert (status, wrong in text) == (400, True), text
        finally:
            await control.resume()


async def test_an_engine_tells_how_far_its_requests_are(control: EngineControl) -> None:
    """Which is how a health check knows that an engine works that is too busy for its probe."""
    await check_generates(control, 60)
    before = Progress.of(await control.progress())
    client = RouterClient(control.url, [control])
    long = replace(SAMPLED, max_tokens=400)
    request = asyncio.ensure_future(client.generate(PROMPT, long, session_id="any"))
    seen = before
    while not seen.running:
        await asyncio.sleep(0.02)
        seen = Progress.of(await control.progress())
    assert not seen.is_ahead_of(seen)
    while not Progress.of(await control.progress()).is_ahead_of(seen):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    await request
    after = Progress.of(await control.progress())
    assert (after.finished, after.running) == (before.finished + 1, {})
    await client.close()
