"""The generate function of runs that train an agent by its API."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from vime.data.tokenizer import load_tokenizer
from vime.errors import UserError
from vime.plugins.loading import load_function
from vime.ports import Generator
from vime.rollout.openai_endpoint.agents import Agent, command_agent, play
from vime.rollout.openai_endpoint.server import Endpoint
from vime.rollout.openai_endpoint.session import Speaker
from vime.types import Sample, SamplingParams


async def generate(
    args: Any, sample: Sample, sampling_params: Mapping[str, Any], evaluation: bool = False
) -> list[Sample]:
    """For ``--custom-generate-function-path``: runs the agent on the sample, see ``agents.play``."""
    return await play(
        agent_of(args.agent_function_path, args.agent_command),
        _endpoint_of(args),
        sample,
        SamplingParams(**sampling_params),
        evaluation=evaluation,
        timeout_s=args.agent_timeout_s,
        max_context=args.max_context_tokens,
        max_transcripts=args.agent_max_transcripts,
        kept=args.agent_samples,
        reward_key=args.eval_reward_key if evaluation else args.reward_key,
    )


@functools.lru_cache(maxsize=8)
def agent_of(function_path: str | None, command: str | None) -> Agent:
    """The agent of a run.

    Raises:
        UserError: neither or both are given, or there is no such function.
    """
    if (function_path is None) == (command is None):
        raise UserError("vime.rollout.openai_endpoint.generate needs one of --agent-function-path and --agent-command")
    if command is not None:
        return command_agent(command)
    return load_function(str(function_path), "--agent-function-path")


def _endpoint_of(args: Any) -> Endpoint:
    return _endpoint(
        args.generator,
        args.hf_checkpoint,
        args.trust_remote_code,
        json.dumps(dict(args.apply_chat_template_kwargs)),
        args.agent_call_format,
        args.rollout_skip_special_tokens,
        args.agent_host,
        args.agent_port,
        args.agent_advertise,
        args.agent_sampling == "ignore",
    )


@functools.lru_cache(maxsize=8)
def _endpoint(
    generator: Generator,
    checkpoint: str,
    trust_remote_code: bool,
    template_kwargs: str,
    call_format: str | None,
    skip_special_tokens: bool,
    host: str,
    port: int,
    advertise: str | None,
    ignores_sampling: bool,
) -> Endpoint:
    """One for the engines of a run, whatever their context is for a set of prompts: it may have a port of its own."""
    speaker = Speaker(
        generator,
        load_tokenizer(checkpoint, trust_remote_code=trust_remote_code),
        template_kwargs=json.loads(template_kwargs),
        call_format=call_format,
        skip_special_tokens=skip_special_tokens,
    )
    return Endpoint(speaker, host=host, port=port, advertise=advertise, ignores_sampling=ignores_sampling)
