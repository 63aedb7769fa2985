"""64 episodes of 8 turns at once on a real engine: what is trained is what it sampled, token by token.

The model is random and calls no tools by itself, so each of its turns counts as a call of one; tools, templates, router
and engine are real.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from tests.data.templates import CHATML, LLAMA3, QWEN3, QWEN25
from tests.serving.conftest import TOLERANCE, Served, reference
from tests.tiny import make_tokenizer
from vime.rollout.multi_turn import Limits, MultiTurn, Said, ToolCall, ToolFunction, Tools
from vime.serving.client import RouterClient
from vime.types import Generation, Sample, SamplingParams, Status

EPISODES, TURNS = 64, 8
TEMPLATES = {
    "SmolLM2": CHATML,
    "Qwen2.5": QWEN25,
    "Qwen3": QWEN3,
    "Llama 3": LLAMA3.replace("<|begin|>", "").replace("<|eot|>", "<|im_end|>").replace("<|head|>", "<|im_start|>"),
}
PARAMS = SamplingParams(max_tokens=500, seed=0)


class Recording:
    """The real engines; keeps what was asked and answered, by session."""

    def __init__(self, client: RouterClient) -> None:
        self._client = client
        self.log: dict[str, list[tuple[list[int], Generation]]] = {}

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session_id: str) -> Generation:
        answer = await self._client.generate(token_ids, params, session_id=session_id)
        self.log.setdefault(session_id, []).append((list(token_ids), copy.deepcopy(answer)))
        return answer

    async def abort(self) -> None:
        await self._client.abort()


async def length(text: str) -> str:
    """Says how long a text is; some calls take a little longer, some fail."""
    await asyncio.sleep(len(text) % 5 / 100)
    if len(text) % 7 == 0:
        raise ValueError("seven")
    return str(len(text))


def every_turn_calls(text: str) -> Said:
    return Said(calls=(ToolCall("length", {"text": text}),))


def tokenizer_with(template: str) -> Any:
    tokenizer = copy.deepcopy(make_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


async def play(engines: Recording, names: list[str]) -> list[Sample]:
    players = {
        name: MultiTurn(engines, tokenizer_with(template), max_context=512) for name, template in TEMPLATES.items()
    }
    samples = [Sample(index=i, group_index=i, prompt=f"{i}?", session_id=f"s{i}") for i in range(len(names))]
    limits = Limits(max_turns=TURNS, max_turn_tokens=12)
    episodes = (
        players[name].run(sample, PARAMS, Tools([ToolFunction(length)], every_turn_calls), limits)
        for name, sample in zip(names, samples, strict=True)
    )
    return await asyncio.gather(*episodes)


async def test_the_trained_tokens_are_exactly_the_sampled_ones(client: RouterClient, tied_engine: Served) -> None:
    engines = Recording(client)
    names = [list(TEMPLATES)[i % len(TEMPLATES)] for i in range(EPISODES)]
    samples = await play(engines, names)
    assert {len(sample.metadata["multi_turn"]["turns"]) for sample in samples} == {TURNS}
    assert {sample.metadata["multi_turn"]["tool_calls"] for sample in samples} == {TURNS}
    ends: Counter[str] = Counter()
    for sample in samples:
        turns = engines.log[str(sample.session_id)]
        check(sample, turns)
        ends.update(answer.finish_reason for _, answer in turns)
    assert ends["length"] > ends["stop"] > 0, "turns that were cut off, and turns that the model ended itself"
    answers = [answer.token_ids for turns in engines.log.values() for _, answer in turns]
    assert sum(reads_otherwise(ids) for ids in answers) > 100, "tokens that would be others if text were encoded again"
    for sample in samples[: len(TEMPLATES)]:
        check_log_probs(sample, tied_engine)


def check(sample: Sample, turns: list[tuple[list[int], Generation]]) -> None:
    """The sample against what the engine was given and what it answered."""
    sample.validate()
    assert sample.status is Status.TRUNCATED and len(turns) == TURNS
    assert sample.loss_mask is not None and sample.rollout_log_probs is not None
    expected = [0] * (len(sample.tokens) - sample.prompt_length)
    for given, answer in turns:
        assert sample.tokens[: len(given)] == given
        begin, count = len(given) - sample.prompt_length, len(answer.token_ids)
        assert sample.tokens[len(given) : len(given) + count] == answer.token_ids
        assert sample.rollout_log_probs[begin : begin + count] == answer.log_probs
        assert sample.weight_versions[begin : begin + count] == answer.weight_versions
        expected[begin : begin + count] = [1] * count
    assert sample.loss_mask == expected
    assert expected[0] == expected[-1] == 1 and 0 in expected


def reads_otherwise(ids: list[int]) -> bool:
    tokenizer = make_tokenizer()
    return bool(tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) != ids)


def check_log_probs(sample: Sample, engine: Served) -> None:
    """transformers, given the whole sample at once, finds the log-probs that the engine had turn by turn."""
    prompt, response = sample.tokens[: sample.prompt_length], sample.tokens[sample.prompt_length :]
    trained = torch.tensor(sample.loss_mask, dtype=torch.bool)
    difference = reference(engine.folder, {}, prompt, response) - torch.tensor(sample.rollout_log_probs)
    assert float(difference[trained].abs().max()) < TOLERANCE
