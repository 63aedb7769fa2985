"""Whole rollouts and evaluations by our own hand."""

from __future__ import annotations

import asyncio
from typing import Any

from examples.plugins.generate import text_of, tools
from examples.plugins.rewards import exact_and_short
from vime.types import Group, Sample, SamplingParams, derive_seed


async def one_turn(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> list[Group]:
    """A rollout in a few lines: every sample of every group at once, each with a seed of its own."""
    groups: list[Group] = data_source.get_samples(args.rollout_batch_size)
    await asyncio.gather(*(answer(args, rollout_id, sample) for group in groups for sample in group))
    return groups


async def evaluate(args: Any, rollout_id: int, data_source: Any, evaluation: bool = True) -> dict[str, dict[str, Any]]:
    """Grades answers to a few prompts of our own."""
    questions = {"What is 2 + 2?": "4", "What is 9 - 3?": "6"}
    samples = [
        Sample(index=i, group_index=i, prompt=question, label=label)
        for i, (question, label) in enumerate(questions.items())
    ]
    await asyncio.gather(*(answer(args, rollout_id, sample) for sample in samples))
    rewards = [sample.reward for sample in samples]
    return {"sums": {"rewards": rewards, "truncated": [sample.truncated for sample in samples], "samples": samples}}


async def answer(args: Any, rollout_id: int, sample: Sample) -> None:
    """Generates and grades one sample."""
    tokenizer, client = tools(args.hf_checkpoint, args.vllm_router_ip, args.vllm_router_port)
    prompt = tokenizer.encode(text_of(sample, tokenizer), add_special_tokens=False)
    params = SamplingParams(
        max_tokens=args.rollout_max_response_len,
        temperature=args.rollout_temperature,
        seed=derive_seed(args.rollout_seed, rollout_id, str(sample.index)),
    )
    generation = await client.generate(prompt, params, session_id=f"{rollout_id}-{sample.index}")
    sample.tokens, sample.response_length = prompt + generation.token_ids, len(generation.token_ids)
    sample.rollout_log_probs, sample.weight_versions = generation.log_probs, generation.weight_versions
    sample.response = tokenizer.decode(generation.token_ids, skip_special_tokens=True)
    sample.status = Sample.Status.COMPLETED if generation.finish_reason == "stop" else Sample.Status.TRUNCATED
    sample.reward = await exact_and_short(args, sample)
