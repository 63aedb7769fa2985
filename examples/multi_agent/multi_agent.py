"""Two roles of one model: a planner turns a question into a calculation, an executor carries it out with a tool.

Each role has a dialogue, and so a sample, of its own. Both come from one generate call: they are children of the sample
that was drawn, share its place in the baseline of the group and its denominator in the loss, and both get the reward of
what came out in the end.
"""

from __future__ import annotations

from typing import Any

from examples.multi_agent.calculator import calculate
from vime.rewards.numbers import last_number
from vime.rollout.multi_turn import Limits, MultiTurn, ToolFunction, final_answer
from vime.types import Message, Sample, derive_seed

LIMITS = Limits(max_turns=4)


def says(role: str, content: str) -> Message:
    return {"role": role, "content": content}


PLANNER = [
    says("system", "Write the calculation that answers the question, and nothing else."),
    says("user", "A bag holds 12 nuts. How many nuts are in 5 bags and 7 more?"),
    says("assistant", "12 * 5 + 7"),
    says("user", "A shelf holds 30 cups. How many cups are on 4 shelves and 9 more?"),
    says("assistant", "30 * 4 + 9"),
]
EXECUTOR = [
    says("system", "Carry out the plan with the tool and say the result."),
    says("user", "Plan: 12 * 5 + 7"),
    says("assistant", '<tool_call>{"name": "calculate", "arguments": {"expression": "12 * 5 + 7"}}</tool_call>'),
    says("tool", "67"),
    says("assistant", "67"),
]


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]:
    """``--custom-generate-function-path``. A role that is interrupted is not continued: both begin anew."""
    player = MultiTurn.from_args(args)
    planner, executor = sample.copy(), sample.copy()
    question = says("user", str(sample.prompt))
    await player.with_tools(planner, sampling_params, [], LIMITS, messages=[*PLANNER, question], resumes=False)
    if not planner.ended_well:
        return planner
    plan = says("user", f"Plan: {final_answer(planner)}")
    params = sampling_params | {"seed": derive_seed(str(sampling_params["seed"]), "executor")}
    tools = [ToolFunction(calculate)]
    await player.with_tools(executor, params, tools, LIMITS, messages=[*EXECUTOR, plan], resumes=False)
    result = final_answer(executor)
    for role, each in (("planner", planner), ("executor", executor)):
        each.metadata = {**each.metadata, "role": role, "result": result}
    return [planner, executor]


async def reward(args: Any, sample: Sample) -> float:
    """``--custom-rm-path``: for both roles, whether the executor's answer is right."""
    found, label = last_number(str(sample.metadata.get("result", ""))), last_number(str(sample.label))
    return float(found is not None and label is not None and found.same_as(label))
