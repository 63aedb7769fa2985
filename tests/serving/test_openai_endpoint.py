"""An unmodified OpenAI client against a real engine behind the real router: what is recorded is what was sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
import torch

from tests.serving.conftest import TOLERANCE, Served, reference
from vime.data.tokenizer import load_tokenizer
from vime.rollout.openai_endpoint import AgentTask, Endpoint, Speaker, play
from vime.serving.client import RouterClient
from vime.types import Generation, Sample, SamplingParams, Status

TURNS = 4
EPISODES = 8


class Noted:
    """The engines, and what they were given and answered."""

    def __init__(self, client: RouterClient) -> None:
        self.client = client
        self.turns: dict[str, list[tuple[list[int], Generation]]] = {}

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session_id: str) -> Generation:
        answer = await self.client.generate(token_ids, params, session_id=session_id)
        self.turns.setdefault(session_id, []).append((list(token_ids), answer))
        return answer

    async def abort(self) -> None: ...


async def agent(task: AgentTask) -> float:
    """Goes on asking; every other time it wants a stream."""
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        for turn in range(TURNS):
            wanted: dict[str, Any] = {"model": task.model, "messages": messages, "max_tokens": 12}
            if turn % 2:
                stream = await client.chat.completions.create(**wanted, stream=True)
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            else:
                text = (await client.chat.completions.create(**wanted)).choices[0].message.content or ""
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And {turn}?"}]
    return 1.0


async def test_trained_tokens_are_the_sampled_ones_in_the_context_in_which_they_were_sampled(
    client: RouterClient, tied_engine: Served
) -> None:
    noted = Noted(client)
    endpoint = Endpoint(Speaker(noted, load_tokenizer(tied_engine.folder)))
    params = SamplingParams(max_tokens=400, seed=3)
    drawn = [Sample(index=i, group_index=0, prompt=f"How many is {i}?", session_id=f"e-{i}") for i in range(EPISODES)]
    played = await asyncio.gather(
        *(play(agent, endpoint, sample, params, timeout_s=120, max_context=512) for sample in drawn)
    )

    for (sample,), i in zip(played, range(EPISODES), strict=True):
        turns = noted.turns[f"e-{i}"]
        assert len(turns) == TURNS == len(sample.metadata["multi_turn"]["turns"])
        assert sample.status in (Status.COMPLETED, Status.TRUNCATED) and sample.reward == 1.0
        sample.validate()
        response = sample.tokens[sample.prompt_length :]
        assert sample.loss_mask is not None and sample.rollout_log_probs is not None
        kept = [at for at, bit in enumerate(sample.loss_mask) if bit]
        assert [response[at] for at in kept] == [token for _, answer in turns for token in answer.token_ids]
        assert [sample.rollout_log_probs[at] for at in kept] == [p for _, answer in turns for p in answer.log_probs]
        for given, answer in turns:
            assert sample.tokens[: len(given) + len(answer.token_ids)] == [*given, *answer.token_ids]

    (sample,) = played[0]
    response = sample.tokens[sample.prompt_length :]
    expected = reference(tied_engine.folder, tied_engine.weights, sample.tokens[: sample.prompt_length], response)
    assert sample.loss_mask is not None
    error = (torch.tensor(sample.rollout_log_probs) - expected).abs() * torch.tensor(sample.loss_mask)
    assert float(error.max()) < TOLERANCE
