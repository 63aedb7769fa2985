"""Generation by our own hand: token ids go in and out, and text is never encoded twice."""

from __future__ import annotations

import functools
from typing import Any

from vime.data.tokenizer import load_tokenizer
from vime.rollout.generate import append
from vime.serving.client import RouterClient
from vime.types import Sample, SamplingParams

HINT = "\nWait.\n"


async def think_twice(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Lets the model use half of the room, adds a hint, and lets it go on. The hint is not its own and not trained."""
    tokenizer, client = tools(args.hf_checkpoint, args.vllm_router_ip, args.vllm_router_port)
    hint = tokenizer.encode(HINT, add_special_tokens=False)
    sample.tokens = tokenizer.encode(text_of(sample, tokenizer), add_special_tokens=False)
    sample.loss_mask = []
    for share in (2, 1):
        room = sampling_params["max_tokens"] - sample.response_length
        params = SamplingParams(**(sampling_params | {"max_tokens": max(room // share, 1)}))
        answer = await client.generate(sample.tokens, params, session_id=str(sample.session_id))
        append(sample, answer)  # tokens, loss mask, log-probs, weight versions and status
        if share == 1 or room - len(answer.token_ids) <= len(hint):
            break
        add_hint(sample, hint)
    sample.response = tokenizer.decode(sample.tokens[sample.prompt_length :], skip_special_tokens=True)
    return sample


def add_hint(sample: Sample, hint: list[int]) -> None:
    """Tokens of ours: masked, with a log-prob of 0 and the version of the tokens before them."""
    assert sample.loss_mask is not None and sample.rollout_log_probs is not None
    sample.tokens += hint
    sample.response_length += len(hint)
    sample.loss_mask += [0] * len(hint)
    sample.rollout_log_probs += [0.0] * len(hint)
    sample.weight_versions += [sample.weight_versions[-1]] * len(hint)


def text_of(sample: Sample, tokenizer: Any) -> str:
    """The prompt as the model shall see it; a list of messages goes through the chat template."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    return str(tokenizer.apply_chat_template(sample.prompt, tokenize=False, add_generation_prompt=True))


@functools.cache
def tools(checkpoint: str, host: str, port: int) -> tuple[Any, RouterClient]:
    """Tokenizer and client, made at the first call."""
    return load_tokenizer(checkpoint), RouterClient(f"http://{host}:{port}")
