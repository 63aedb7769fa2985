"""Rewards that a random model can already earn, so that tiny runs have something to learn."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from examples.plugins.generate import text_of, tools
from vime.rollout.generate import append
from vime.types import Sample, SamplingParams


async def short_words(args: Any, sample: Sample) -> float:
    """Prefers answers with many different characters."""
    return len(set(sample.response)) / max(len(sample.response), 1)


async def rest(args: Any, sample: Sample, **_: Any) -> None:
    """Leaves the cores to others, while servers start."""
    await asyncio.sleep(2.0)


async def stop_at_the_fourth(args: Any, sample: Sample, *, rollout_id: int, **_: Any) -> None:
    """Whoever waits for what a run has saved by then has all the time."""
    if rollout_id >= 3:
        await asyncio.sleep(3600)


ONE_PROGRAM = 40  # the index of a sample, in the second rollout of 32


async def rest_and_one_program(args: Any, sample: Sample, **_: Any) -> None:
    """``rest``, and one answer is taken for a program that its grader runs for a quarter of a minute."""
    if sample.index == ONE_PROGRAM:
        sample.response = "```python\nimport time\ntime.sleep(15)\nprint(7)\n```\n"
        sample.metadata |= {"rm_type": "code", "tests": [{"input": "", "output": "7"}], "time_limit_s": 25}
    await rest(args, sample)


async def broken(args: Any, sample: Sample) -> float:
    """Fails on every sample."""
    raise RuntimeError("the reward service is down")


async def one_or_two(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Two answers to every other prompt's draw, as if an agent had made two samples of one."""
    tokenizer, client = tools(args.hf_checkpoint, args.vllm_router_ip, args.vllm_router_port)
    children = [copy.deepcopy(sample) for _ in range(1 + (sample.index or 0) % 2)]
    for number, child in enumerate(children):
        child.tokens = tokenizer.encode(text_of(child, tokenizer), add_special_tokens=False)
        params = SamplingParams(**(sampling_params | {"seed": sampling_params["seed"] + number}))
        append(child, await client.generate(child.tokens, params, session_id=str(child.session_id)))
        child.response = tokenizer.decode(child.tokens[child.prompt_length :], skip_special_tokens=True)
    return children
