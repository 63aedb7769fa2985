"""Episodes of several turns: the model speaks, the environment answers, and only what was sampled is trained.

async def generate(args, sample, sampling_params):  # --custom-generate-function-path
    return await MultiTurn.from_args(args).with_tools(sample, sampling_params, [ToolFunction(add)])
"""

from vime.rollout.multi_turn.environment import Environment, EpisodeFailed, Turn
from vime.rollout.multi_turn.episode import Limits, MultiTurn
from vime.rollout.multi_turn.templates import TurnTemplate
from vime.rollout.multi_turn.tool_calls import BadCall, Said, ToolCall
from vime.rollout.multi_turn.tools import Tool, ToolFailed, ToolFunction, Tools
from vime.rollout.multi_turn.transcript import NotAppended, Transcript, final_answer, marked

__all__ = [
    "BadCall",
    "Environment",
    "EpisodeFailed",
    "Limits",
    "MultiTurn",
    "NotAppended",
    "Said",
    "Tool",
    "ToolCall",
    "ToolFailed",
    "ToolFunction",
    "Tools",
    "Transcript",
    "Turn",
    "TurnTemplate",
    "final_answer",
    "marked",
]
