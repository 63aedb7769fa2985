"""Generation by our own hand: token ids go in and out, and text is never encoded twice."""

from __future__ import annotations

import functools
from typing import Any

from vime.data.tokenizer import load_tokenizer
from vime.serving.client import RouterClient
from vime.types import Sample, SamplingParams

HINT = "\nWait, let me check that again.\n"


async def think_twice(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Lets the model answer, adds a hint, and lets it go on; the hint is not the model's own and not trained."""
    tokenizer, client = tools(args.hf_checkpoint, args.vllm_router_ip, args.vllm_router_port)
    hint = tokenizer.encode(HINT, add_special_tokens=False)
    prompt = tokenizer.encode(text_of(sample, tokenizer), add_special_tokens=False)
    response: list[int] = []
    mask: list[int] = []
    log_probs: list[float] = []
    versions: list[int] = []
    for turn in range(2):
        budget = sampling_params["max_tokens"] - len(response)
        if budget <= 0:
            break
        params = SamplingParams(**(sampling_params | {"max_tokens": budget}))
        answer = await client.generate(prompt + response, params, session_id=str(sample.session_id))
        response += answer.token_ids
        mask += [1] * len(answer.token_ids)
        log_probs += answer.log_probs
        versions += answer.weight_versions
        if answer.finish_reason != "stop" or turn == 1:
            break
        response, mask = response + hint, mask + [0] * len(hint)
        log_probs, versions = log_probs + [0.0] * len(hint), versions + [versions[-1]] * len(hint)
    sample.tokens, sample.response_length, sample.loss_mask = prompt + response, len(response), mask
    sample.rollout_log_probs, sample.weight_versions = log_probs, versions
    sample.response = tokenizer.decode(response, skip_special_tokens=True)
    sample.status = Sample.Status.COMPLETED if answer.finish_reason == "stop" else Sample.Status.TRUNCATED
    return sample


def text_of(sample: Sample, tokenizer: Any) -> str:
    """The prompt as the model shall see it; a list of messages goes through the chat template."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    return str(tokenizer.apply_chat_template(sample.prompt, tokenize=False, add_generation_prompt=True))


@functools.cache
def tools(checkpoint: str, host: str, port: int) -> tuple[Any, RouterClient]:
    """Tokenizer and client, made at the first call."""
    return load_tokenizer(checkpoint), RouterClient(f"http://{host}:{port}")
