"""A custom generate function for the demo in which every response has all its tokens.

TRL's side cannot stop early either, so that the steps of both have equally many tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from vime.data.chat import PromptEncoder
from vime.data.tokenizer import load_tokenizer
from vime.rollout.generate import SingleTurn
from vime.serving.client import RouterClient
from vime.types import Sample, SamplingParams


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """What vime's own function does, with ``ignore_eos``."""
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    params = SamplingParams(**{name: sampling_params[name] for name in names})
    url = f"http://{args.vllm_router_ip}:{args.vllm_router_port}"
    single_turn = _single_turn(url, args.hf_checkpoint, args.vllm_max_model_len)
    return await single_turn(sample, dataclasses.replace(params, ignore_eos=True))


@functools.cache
def _single_turn(url: str, model: str, max_context: int) -> SingleTurn:
    tokenizer = load_tokenizer(model)
    encoder = PromptEncoder(tokenizer, apply_chat_template=True)
    return SingleTurn(RouterClient(url), encoder.encode, tokenizer.decode, max_context)
