"""Runs a user's agent for a sample against the endpoint, and makes samples of what it did."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import shlex
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from vime.deadlines import Deadline
from vime.metadata import BadMetadata, checked
from vime.plugins.calling import Raised, in_time, said
from vime.processes import close_pipes, ended
from vime.rewards.values import RewardFailed, to_number
from vime.rollout.multi_turn.tool_calls import UNREADABLE
from vime.rollout.multi_turn.transcript import METADATA_KEY
from vime.rollout.openai_endpoint.server import MAX_TRANSCRIPTS, MODEL, Endpoint
from vime.rollout.openai_endpoint.session import Kept, Session
from vime.types import Message, Sample, SamplingParams, Status

_GRACE_S = 5.0  # for an agent that is told to end
_TAIL_BYTES = 1 << 20  # what is kept of a program's output
_DRAIN_S = 1.0  # for output that is on its way when a program has ended
_CHUNK = 1 << 16


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
graded as others are. A reward is a finite number, or a dict that has one under the run's ``--reward-key``."""

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
    max_context: int,
    max_transcripts: int = MAX_TRANSCRIPTS,
    kept: Kept = "all",
    reward_key: str | None = None,
) -> list[Sample]:
    """Runs the agent on one sample.

    Args:
        max_context: the most tokens that prompt and response may have together.
        max_transcripts: that the agent may begin.
        reward_key: which value of a dict is the reward.

    Returns one sample for each transcript, all with what the agent's result says. An agent that is not done in time, or
    that gives up when there is no room for a further answer, leaves samples that are TRUNCATED. One that fails
    otherwise, or never asks the model, leaves one that is FAILED. When generation is interrupted, the sample begins
    anew another time: an agent cannot be continued.

    Raises:
        Exception: what the engines raised, unless the agent made that request again and was answered. Whatever it made
            of a failure, its result tells nothing of the model.
    """
    opened = endpoint.session(
        params,
        sample.session_id or f"sample-{sample.index}",
        max_context=max_context,
        max_transcripts=max_transcripts,
    )
    async with opened as session:
        task = AgentTask(
            base_url=endpoint.base_url(session),
            api_key=session.id,
            model=MODEL,
            prompt=sample.copy().prompt,
            label=sample.label,
            metadata=sample.copy().metadata,
            evaluation=evaluation,
        )
        end = await _end_of(_called(agent, task, reward_key), session, timeout_s)
    if session.interrupted.is_set():
        return [_fresh(sample)]
    if session.failure is not None:
        raise session.failure
    samples = session.samples(sample, kept)
    if not samples or (isinstance(end, AgentFailed) and not session.is_full):
        return [_failed(sample, str(end) if isinstance(end, Exception) else "it never asked the model")]
    for each in samples:
        _finish(each, end)
    return samples


_End: TypeAlias = Mapping[str, Any] | AgentFailed | TimeoutError


async def _end_of(called: Coroutine[Any, Any, _End], session: Session, timeout_s: float) -> _End:
    """The agent's result, or why there is none. It has ended, or did not within a grace period of being cancelled."""
    deadline = Deadline(timeout_s)
    running = deadline.start(called)
    stopped = asyncio.ensure_future(session.interrupted.wait())
    try:
        await deadline.first_of({running, stopped})
    finally:
        done = running.done()
        stopped.cancel()
        running.cancel()
        await asyncio.wait({running}, timeout=_GRACE_S)
    if not done:
        return TimeoutError(f"not done within {timeout_s:g} s")
    return AgentFailed("it was cancelled") if running.cancelled() else running.result()


async def _called(agent: Agent, task: AgentTask, reward_key: str | None) -> _End:
    async def call() -> _End:
        return _checked(await agent(task), reward_key)

    try:
        return await in_time(call)
    except Raised as failed:
        error, words = failed.error, said(failed.error)[:500]
        if isinstance(error, SystemExit):
            return AgentFailed(f"it ended with exit({error.code})")
        if isinstance(error, asyncio.CancelledError):
            return AgentFailed("it was cancelled")
        return AgentFailed(words if isinstance(error, AgentFailed) else f"{type(error).__name__}: {words}")


def _checked(result: Any, reward_key: str | None) -> Mapping[str, Any]:
    """The result as a dict. It may be what the model wrote, so that nothing of it may end a run."""
    given = result if isinstance(result, Mapping) else {"reward": result}
    try:
        found = {name: checked(value, name) if isinstance(value, Mapping) else value for name, value in given.items()}
    except BadMetadata as error:
        raise AgentFailed(f"its result cannot be kept: {error}") from error
    metadata, reward = found.get("metadata", {}), given.get("reward")
    if set(found) - {"reward", "metadata"} or not isinstance(metadata, Mapping) or METADATA_KEY in metadata:
        raise AgentFailed(f"a result has a reward and metadata (a dict without {METADATA_KEY!r}), not {found!r}")
    try:
        if isinstance(reward, Mapping):
            to_number(reward.get(reward_key))
        elif reward is not None:
            to_number(reward)
    except RewardFailed as error:
        which = f" {reward_key!r} (--reward-key) of the dict" if isinstance(reward, Mapping) else ""
        raise AgentFailed(f"{error}: an agent returns a reward, a dict or nothing{which and f';{which}'}") from error
    return found


def _fresh(sample: Sample) -> Sample:
    sample.status = Status.ABORTED
    return sample


def _failed(sample: Sample, why: str) -> Sample:
    sample.status = Status.FAILED
    known = {"turns": [], "failure": f"the agent failed: {why}"}
    sample.metadata = {**sample.metadata, METADATA_KEY: known}
    return sample


def _finish(sample: Sample, end: _End) -> None:
    if isinstance(end, Exception):
        sample.status = Status.TRUNCATED
        sample.metadata[METADATA_KEY]["failure"] = str(end)
        return
    sample.metadata = {**sample.metadata, **copy.deepcopy(dict(end.get("metadata", {})))}
    if end.get("reward") is not None:
        sample.reward = copy.deepcopy(end["reward"])


def command_agent(command: str) -> Agent:
    """A program as an agent.

    It finds the endpoint in ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, and reads the task as JSON from standard input:
    ``{"prompt", "label", "metadata", "evaluation", "model"}``. The last line of its standard output may be its result,
    as JSON. It has failed when its exit status is not 0. When it ends, what it started is ended.
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
        status, out, err = await _talked(process, json.dumps(given).encode())
        if status:
            lines = err.decode(errors="replace").strip().splitlines()
            raise AgentFailed(f"{words[0]} ended with status {status}: {lines[-1] if lines else ''}")
        return _last_line(out)

    return agent


async def _talked(process: asyncio.subprocess.Process, given: bytes) -> tuple[int, bytearray, bytearray]:
    """The status of a program that was given that, and the ends of its outputs. Its group is gone afterwards."""
    out, err = bytearray(), bytearray()
    reading = {
        asyncio.ensure_future(_keep_tail(process.stdout, out)),
        asyncio.ensure_future(_keep_tail(process.stderr, err)),
    }
    telling = asyncio.ensure_future(_tell(process.stdin, given))
    try:
        status = await ended(process)
        _kill_group(process)
        await asyncio.wait(reading, timeout=_DRAIN_S)  # who has left the group may hold the pipes
    finally:
        _kill_group(process)
        for each in (telling, *reading):
            each.cancel()
        close_pipes(process)
    return status, out, err


async def _tell(stream: asyncio.StreamWriter | None, given: bytes) -> None:
    assert stream is not None
    with contextlib.suppress(ConnectionError):  # it does not want to know
        stream.write(given)
        await stream.drain()
        stream.close()


async def _keep_tail(stream: asyncio.StreamReader | None, kept: bytearray) -> None:
    assert stream is not None
    while chunk := await stream.read(_CHUNK):
        kept += chunk
        del kept[:-_TAIL_BYTES]


def _kill_group(process: asyncio.subprocess.Process) -> None:
    """It and what it started, as far as that stayed in its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_line(out: bytes | bytearray) -> AgentResult:
    lines = out.decode(errors="replace").strip().split("\n")
    try:
        result = json.loads(lines[-1])
    except UNREADABLE:
        return None
    return result if isinstance(result, dict) and set(result) <= {"reward", "metadata"} else None
