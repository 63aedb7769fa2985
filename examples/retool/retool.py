"""The model computes by writing Python, which runs in the sandbox, and learns to do so from right answers alone."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from vime.rewards.numbers import last_number
from vime.rollout.multi_turn import EpisodeFailed, Limits, MultiTurn, final_answer
from vime.sandbox import Limits as SandboxLimits
from vime.sandbox import LocalSandbox, Outcome, Sandbox, SandboxError
from vime.types import Sample

LIMITS = Limits(max_turns=6, tool_timeout_s=None, max_result_chars=2000)
"""The sandbox ends each program in time. A deadline of the tool would count the wait for a free core, too."""

SANDBOX_LIMITS = SandboxLimits(wall_s=10, cpu_s=5)


class Python:
    """A Tool that runs programs. Nothing is remembered from one call to the next."""

    name = "python"
    description = "Runs a Python program and returns what it prints."
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "the program"}},
        "required": ["code"],
    }

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def call(self, arguments: Mapping[str, Any]) -> str:
        files = {"main.py": arguments["code"]}
        try:
            result = await self._sandbox.run(files, ["python3", "main.py"], limits=SANDBOX_LIMITS)
        except SandboxError as error:  # no fault of the model: such an episode is not trained on
            raise EpisodeFailed(str(error)) from error
        if result.status is not Outcome.EXITED:
            return f"{result.stdout}{result.stderr}The program was stopped: {result.status.value}."
        return (result.stdout + result.stderr).strip() or "The program printed nothing."


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """``--custom-generate-function-path``"""
    return await MultiTurn.from_args(args).with_tools(sample, sampling_params, [Python(sandbox())], LIMITS)


async def reward(args: Any, sample: Sample) -> float:
    """``--custom-rm-path``: whether the last number of the last turn is the label. What tools print does not count."""
    answer, label = last_number(final_answer(sample)), last_number(str(sample.label))
    return float(answer is not None and label is not None and answer.same_as(label))


@functools.cache
def sandbox() -> Sandbox:
    """One for the whole run; ``vime.sandbox.RemoteSandbox(URL)`` has the same interface."""
    return LocalSandbox()
