"""Runs a user's agent for a sample against the endpoint, and makes samples of what it did."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import shlex
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from vime.rollout.multi_turn.transcript import METADATA_KEY
from vime.rollout.openai_endpoint.server import MODEL, Endpoint
from vime.rollout.openai_endpoint.session import Kept, Session
from vime.types import Message, Sample, SamplingParams, Status

_GRACE_S = 5.0  # for an agent that is told to end
_MAX_OUTPUT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """What an agent is given."""

    base_url: str  # for an OpenAI client
    api_key: str  # of this session
    model: str
    prompt: str | list[Message]
    label: str | None
    metadata: dict[str, Any]
    evaluation: bool


AgentResult: TypeAlias = float | Mapping[str, Any] | None
"""The reward, or ``{"reward": ..., "metadata": {...}}`` of which both may be left out. Without a reward the samples are
graded as others are."""

Agent: TypeAlias = Callable[[AgentTask], Awaitable[AgentResult]]


class AgentFailed(Exception):
    """An agent ended in another way than by finishing its task; one line."""


async def play(
    agent: Agent,
    endpoint: Endpoint,
    sample: Sample,
    params: SamplingParams,
    *,
    evaluation: bool = False,
    timeout_s: float,
    kept: Kept = "all",
) -> list[Sample]:
    """Runs the agent on one sample.

    Returns one sample for each transcript, all with what the agent's result says. An agent that is not done in time, or
    that gives up when there is no room for a further answer, leaves samples that are TRUNCATED. One that fails
    otherwise, or never asks the model, leaves one that is FAILED. When generation is interrupted, the sample begins
    anew another time: an agent cannot be continued.

    Raises:
        Exception: what the engines raised, where the agent failed over it.
    """
    async with endpoint.session(params, sample.session_id or f"sample-{sample.index}") as session:
        task = AgentTask(
            base_url=endpoint.base_url(session),
            api_key=session.id,
            model=MODEL,
            prompt=sample.copy().prompt,
            label=sample.label,
            metadata=sample.copy().metadata,
            evaluation=evaluation,
        )
        ended = await _ended(agent, task, session, timeout_s)
    if session.interrupted.is_set():
        return [_fresh(sample)]
    if isinstance(ended, Exception) and session.failure is not None:
        raise session.failure
    samples = session.samples(sample, kept)
    if not samples or (isinstance(ended, Exception) and not isinstance(ended, TimeoutError) and not session.is_full):
        return [_failed(sample, str(ended) if isinstance(ended, Exception) else "it never asked the model")]
    for each in samples:
        _finish(each, ended)
    return samples


async def _ended(agent: Agent, task: AgentTask, session: Session, timeout_s: float) -> AgentResult | Exception:
    """The agent's result, or why there is none. It has ended, or did not within a grace period of being cancelled."""
    running = asyncio.ensure_future(_called(agent, task))
    stopped = asyncio.ensure_future(session.interrupted.wait())
    try:
        await asyncio.wait({running, stopped}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        done = running.done()
        stopped.cancel()
        running.cancel()
        await asyncio.wait({running}, timeout=_GRACE_S)
    if not done:
        return TimeoutError(f"not done within {timeout_s:g} s")
    return AgentFailed("it was cancelled") if running.cancelled() else running.result()


async def _called(agent: Agent, task: AgentTask) -> AgentResult | Exception:
    try:
        return _checked(await agent(task))
    except SystemExit as error:
        return AgentFailed(f"it ended with exit({error.code})")
    except Exception as error:  # agents are the user's: they raise what they like
        text = " ".join(str(error).split())[:500]
        return AgentFailed(text if isinstance(error, AgentFailed) else f"{type(error).__name__}: {text}")


def _checked(result: Any) -> AgentResult:
    if isinstance(result, Mapping):
        unknown = set(result) - {"reward", "metadata"}
        if unknown or not isinstance(result.get("metadata", {}), Mapping):
            raise AgentFailed(f"a result has a reward and metadata (a dict), not {dict(result)!r}")
        return result
    if result is not None and (isinstance(result, bool) or not isinstance(result, int | float)):
        raise AgentFailed(f"an agent returns a reward, a dict or nothing, not {result!r}")
    return result


def _fresh(sample: Sample) -> Sample:
    sample.status = Status.ABORTED
    return sample


def _failed(sample: Sample, why: str) -> Sample:
    sample.status = Status.FAILED
    known = {"turns": [], "failure": f"the agent failed: {why}"}
    sample.metadata = {**sample.metadata, METADATA_KEY: known}
    return sample


def _finish(sample: Sample, ended: AgentResult | Exception) -> None:
    if isinstance(ended, Exception):
        sample.status = Status.TRUNCATED
        sample.metadata[METADATA_KEY]["failure"] = str(ended)
        return
    result: Mapping[str, Any] = ended if isinstance(ended, Mapping) else {"reward": ended}
    sample.metadata = {**sample.metadata, **result.get("metadata", {})}
    if result.get("reward") is not None:
        sample.reward = copy.deepcopy(result["reward"])


def command_agent(command: str) -> Agent:
    """A program as an agent.

    It finds the endpoint in ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, and reads the task as JSON from standard input:
    ``{"prompt", "label", "metadata", "evaluation", "model"}``. The last line of its standard output may be its result,
    as JSON. It has failed when its exit status is not 0.
    """
    words = shlex.split(command)

    async def agent(task: AgentTask) -> AgentResult:
        given = {name: getattr(task, name) for name in ("prompt", "label", "metadata", "evaluation", "model")}
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key},
            start_new_session=True,
        )
        try:
            out, err = await process.communicate(json.dumps(given).encode())
        finally:
            _kill_group(process)
        if process.returncode:
            lines = err.decode(errors="replace").strip().splitlines()
            raise AgentFailed(f"{words[0]} ended with status {process.returncode}: {lines[-1] if lines else ''}")
        return _last_line(out)

    return agent


def _kill_group(process: asyncio.subprocess.Process) -> None:
    """It and what it started, as far as that stayed in its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_line(out: bytes) -> AgentResult:
    lines = out[-_MAX_OUTPUT_BYTES:].decode(errors="replace").strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return result if isinstance(result, dict) and set(result) <= {"reward", "metadata"} else None
