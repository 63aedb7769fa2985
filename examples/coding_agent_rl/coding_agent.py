"""An agent that writes a program, runs tests, and goes on until they pass. It speaks OpenAI's API and nothing else:
with another base URL the same function asks any other server.

The tests that it runs are those that the task shows; the reward comes from others (``--rm-type code``).
"""

from __future__ import annotations

import functools
from typing import Any

import openai

from vime.rewards.code import last_block
from vime.sandbox import Limits, LocalSandbox, Outcome, Sandbox

MAX_TURNS = 4
LIMITS = Limits(wall_s=10, cpu_s=2)


async def solve(task: Any) -> dict[str, Any]:
    """``--agent-function-path``"""
    messages = [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else list(task.prompt)
    passed = False
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        for _ in range(MAX_TURNS):
            answer = await client.chat.completions.create(model=task.model, messages=messages)
            said = answer.choices[0].message.content or ""
            problem = await first_problem(last_block(said), task.metadata["public_tests"])
            passed = problem is None
            if passed:
                break
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": problem}]
    return {"metadata": {"passed_public_tests": passed}}


async def first_problem(program: str | None, tests: list[str]) -> str | None:
    """What the agent tells the model; None where all tests pass."""
    if program is None:
        return "There is no finished block of code. Write one, between ```python and ```."
    files = {"solution.py": program, "check.py": "from solution import *\n" + "\n".join(tests)}
    result = await sandbox().run(files, ["python3", "check.py"], limits=LIMITS)
    if result.ok:
        return None
    if result.status is not Outcome.EXITED:
        return f"It was stopped ({result.status.value}). Write a better one."
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip(" ^~")]
    return "\n".join(["It fails:", *lines[-2:], "Correct it."])


@functools.cache
def sandbox() -> Sandbox:
    """One for the whole run; ``vime.sandbox.RemoteSandbox(URL)`` has the same interface."""
    return LocalSandbox()
