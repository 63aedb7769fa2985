"""Engines tell to which experts they sent each token. transformers, in float32, says where it would have sent it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from tests.serving.conftest import Sender, Served, changed, generating, serve
from tests.tiny import make_model
from vime.config.vllm_build import is_cpu_build
from vime.models import load_shape
from vime.models.routes import RouteShape
from vime.rollout.generate import append
from vime.serving import answers
from vime.serving.answers import GENERATE
from vime.serving.client import RouterClient, request_body
from vime.serving.control import EngineControl
from vime.serving.engine import EngineServer, EngineSpec
from vime.serving.health import check_generates
from vime.serving.http import EngineError
from vime.types import Generation, Sample, SamplingParams

pytestmark = pytest.mark.timeout(600)

EXPERTS = {"num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4}  # the first layer is dense
PARAMS = SamplingParams(max_tokens=24, seed=1, ignore_eos=True, routed_experts_prompt_start=0)
LONG = [7 + (31 * i * i + 5 * i) % 480 for i in range(300)]  # more than one block of the prefix cache
NEAR_TIE = 0.2
"""Logits of experts are spread by 0.8; those that are nearer than this may change places in bfloat16."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("routes")
    model = make_model(folder / "model", "qwen3_moe", **EXPERTS)
    yield from serve(model, folder, cpu=is_cpu_build(), routes=True, flags={"dtype": "bfloat16"})


@pytest.fixture
async def client(engine: Served) -> AsyncIterator[RouterClient]:
    async for each in client_of(engine):
        yield each


async def client_of(engine: Served) -> AsyncIterator[RouterClient]:
    control = EngineControl(engine.url, "engine 0")
    client = RouterClient(engine.url, [control], routes=RouteShape.of(load_shape(engine.folder)))
    yield client
    await client.close()
    await control.close()


async def told(client: RouterClient, prompt: Sequence[int], params: SamplingParams = PARAMS) -> np.ndarray:
    """Routes of the whole text, with the prompt before."""
    return routes_in(await client.generate(prompt, params, session_id="any"))


def routes_in(generation: Generation) -> np.ndarray:
    assert generation.routed_experts is not None
    return generation.routed_experts


@functools.cache
def plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def chosen_otherwise(folder: Path, tokens: Sequence[int], routes: np.ndarray) -> tuple[float, float]:
    """The share of tokens and layers for which the float32 model chooses other experts, and how far from a tie its
    logits are there at most."""
    with torch.no_grad():
        logits = torch.stack(plain(folder)(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits, 1)
    best = logits.topk(EXPERTS["num_experts_per_tok"] + 1, -1)
    own = best.indices[..., :-1].sort(-1).values
    other = (own != torch.from_numpy(np.sort(routes, -1).astype(np.int64))).any(-1)
    gaps = (best.values[..., -2] - best.values[..., -1])[other]
    return float(other.float().mean()), float(gaps.max()) if len(gaps) else 0.0


async def test_routes_are_those_of_the_float32_model_but_for_near_ties(client: RouterClient, engine: Served) -> None:
    """Of every token that was computed; also where many are computed at a time."""
    prompts = [LONG[: 20 + 13 * i] for i in range(12)]
    asked = [client.generate(prompt, PARAMS, session_id=str(i)) for i, prompt in enumerate(prompts)]
    shares = []
    for prompt, generation in zip(prompts, await asyncio.gather(*asked), strict=True):
        tokens, routes = [*prompt, *generation.token_ids], routes_in(generation)
        assert routes.dtype == np.uint8 and routes.shape == (len(tokens) - 1, 3, 4)
        share, gap = chosen_otherwise(engine.folder, tokens, routes)
        shares.append(share)
        assert gap < NEAR_TIE
    assert 0.001 < np.mean(shares) < 0.06, "there are such ties, and they are rare"


async def test_tokens_in_the_prefix_cache_have_routes_too(client: RouterClient) -> None:
    whole, again = await told(client, LONG), await told(client, LONG)
    assert np.array_equal(again[: len(LONG) - 1], whole[: len(LONG) - 1])
    later = await told(client, LONG, replace(PARAMS, routed_experts_prompt_start=290))
    assert np.array_equal(later, again[290:])


async def test_an_interrupted_answer_goes_on_with_the_routes_that_it_had(client: RouterClient, engine: Served) -> None:
    sample = Sample(index=0, tokens=LONG[:200])
    running = asyncio.create_task(client.generate(sample.tokens, replace(PARAMS, max_tokens=250), session_id="a"))
    await generating(engine.url)
    await client.abort()
    append(sample, await running)
    begun, had = len(sample.tokens), sample.rollout_routed_experts
    assert sample.aborted and 200 < begun < 450 and had is not None and len(had) == begun - 1
    rest = replace(PARAMS, routed_experts_prompt_start=len(had))
    append(sample, await client.generate(sample.tokens, rest, session_id="a"))
    routes = sample.rollout_routed_experts
    assert routes is not None and len(routes) == begun + 24 - 1
    assert np.array_equal(routes[: begun - 1], had)
    assert chosen_otherwise(engine.folder, sample.tokens, routes)[1] < NEAR_TIE


async def test_routes_survive_a_weight_sync_in_the_middle_of_an_answer(client: RouterClient, engine: Served) -> None:
    """Its keys and values are computed again, with other routes; those which it was sampled along are told."""
    control = EngineControl(engine.url, "engine 0")
    sender, old = Sender({name: each.bfloat16() for name, each in engine.weights.items()}, control), engine.weights
    new = {name: each.bfloat16() for name, each in changed(old, seed=1).items()}
    running = asyncio.create_task(client.generate(LONG[:50], replace(PARAMS, max_tokens=400), session_id="a"))
    await generating(engine.url)
    version, _ = await sender.send(new)
    generation = await running
    await sender.send({name: each.bfloat16() for name, each in old.items()})
    await control.close()
    tokens, routes = [*LONG[:50], *generation.token_ids], routes_in(generation)
    assert len(routes) == len(tokens) - 1
    sampled_before = generation.weight_versions.index(version)
    assert 0 < sampled_before < 400
    before = 50 + sampled_before - 1
    assert chosen_otherwise(engine.folder, tokens[: before + 1], routes[:before])[1] < NEAR_TIE
    assert chosen_otherwise(engine.folder, tokens, routes)[1] > NEAR_TIE


async def test_nobody_gets_routes_that_he_does_not_want(client: RouterClient, engine: Served) -> None:
    """They are not even in the answer: 24 tokens are less than 500 bytes, the routes of 323 tokens 3,876."""
    unwanted = replace(PARAMS, routed_experts_prompt_start=None)
    assert (await client.generate(LONG, unwanted, session_id="a")).routed_experts is None
    sizes = []
    async with aiohttp.ClientSession(headers={"accept": answers.MEDIA_TYPE}) as session:
        for params in (unwanted, PARAMS):
            async with session.post(engine.url + GENERATE, json=request_body(LONG, params)) as answer:
                assert answer.headers["content-type"] == answers.MEDIA_TYPE
                sizes.append(len(await answer.read()))
    assert sizes[0] < 500
    routes = (len(LONG) + 24 - 1) * EXPERTS["num_hidden_layers"] * EXPERTS["num_experts_per_tok"]
    assert 0 < sizes[1] - sizes[0] - routes < 100


async def test_an_engine_that_tells_none_is_found_out_at_its_start(control: EngineControl) -> None:
    await check_generates(control, 60)
    shape = RouteShape(num_layers=2, layers=(0, 1), num_experts=8, top_k=2)
    with pytest.raises(EngineError, match=r"^engine 0 .*: --use-rollout-routing-replay: an engine's answer has no ro"):
        await check_generates(control, 60, routes=shape)


async def test_an_engine_that_tells_those_of_another_model_is_found_out_too(engine: Served) -> None:
    control = EngineControl(engine.url, "engine 0")
    right = RouteShape.of(load_shape(engine.folder))
    await check_generates(control, 60, routes=right)
    with pytest.raises(EngineError, match=r"^engine 0 .*: the routes in an engine's answer have the shape \[1, 4, 4\]"):
        await check_generates(control, 60, routes=replace(right, top_k=2))
    await control.close()


@pytest.mark.slow
def test_an_engine_without_a_prefix_cache_does_not_start(tmp_path: Path) -> None:
    """vLLM's own guard looks at a flag that is not given on CPUs, where no route would be found again."""
    if not is_cpu_build():
        pytest.skip("there vLLM's own guard holds")
    model = make_model(tmp_path / "model", "qwen3_moe", **EXPERTS)
    spec = EngineSpec(model=model, routes=True, flags={"enable_prefix_caching": False})
    with pytest.raises(EngineError, match="Engine core initialization failed"):
        EngineServer(spec, log_dir=tmp_path).start()
    said = (tmp_path / "engine_0.log").read_text()
    assert "ValueError: --use-rollout-routing-replay needs the prefix cache, which vLLM has turned off" in said


KINDS = {
    "two processes": {"tensor_parallel_size": 2},
    "prompts in chunks": {
        "flags": {
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 16,
            "max_model_len": 512,
        }
    },
    "drafts": {
        "flags": {
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
        }
    },
}


@pytest.fixture(params=KINDS)
def float32_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    yield from serve(
        make_model(tmp_path / "model", "qwen3_moe", **EXPERTS), tmp_path, routes=True, **KINDS[request.param]
    )


@pytest.mark.slow
async def test_every_kind_of_engine_tells_the_routes_of_the_float32_model(float32_engine: Served) -> None:
    """In float32 there are no ties. Prompts repeat themselves, so that drafts are right now and then."""
    params = replace(PARAMS, seed=None, temperature=0.0, max_tokens=60)  # vLLM 0.32 cannot seed prompts in chunks
    prompts = [[*LONG[: 100 + 20 * i], *([11, 12, 13] * 20)] for i in range(8)]
    async for client in client_of(float32_engine):
        asked = [client.generate(prompt, params, session_id=str(i)) for i, prompt in enumerate(prompts)]
        for prompt, generation in zip(prompts, await asyncio.gather(*asked), strict=True):
            tokens = [*prompt, *generation.token_ids]
            assert chosen_otherwise(float32_engine.folder, tokens, routes_in(generation)) == (0.0, 0.0)
