"""The stand-in for the engine answers as one does."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from vime.plugins.engine import PATH, synthetic_engine
from vime.serving.client import EngineError, RouterClient
from vime.types import SamplingParams


@pytest.mark.parametrize(("max_tokens", "count", "reason"), [(64, 5, "stop"), (2, 2, "length")])
async def test_our_client_reads_it(max_tokens, count, reason):
    with synthetic_engine() as (host, port):
        client = RouterClient(f"http://{host}:{port}")
        answer = await client.generate([1, 2], SamplingParams(max_tokens=max_tokens), session_id="s")
        await client.close()
    assert (answer.token_ids, answer.finish_reason) == ([40, 41, 42, 43, 44][:count], reason)
    assert len(answer.log_probs) == len(answer.weight_versions) == count


def test_another_client_gets_the_answer_of_vllm():
    with synthetic_engine() as (host, port):
        body = json.dumps({"token_ids": [1], "sampling_params": {"max_tokens": 3}}).encode()
        with urllib.request.urlopen(f"http://{host}:{port}{PATH}", body) as answer:
            (choice,) = json.load(answer)["choices"]
    assert choice["token_ids"] == [40, 41, 42] and len(choice["logprobs"]["content"]) == 3


async def test_a_wrong_request_is_refused_as_an_engine_would():
    with synthetic_engine() as (host, port):
        client = RouterClient(f"http://{host}:{port}")
        with pytest.raises(EngineError, match="answered /inference/v1/generate with 400"):
            await client.generate([], SamplingParams(max_tokens=3), session_id="s")
        await client.close()


def test_another_path_says_what_there_is():
    with synthetic_engine() as (host, port), pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://{host}:{port}/v1/chat/completions", b"{}")
    assert f"answers POST {PATH} alone" in caught.value.read().decode()
