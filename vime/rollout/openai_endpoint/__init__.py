"""Trains programs that speak with OpenAI's API: they are pointed at an endpoint in front of the run's engines.

    --custom-generate-function-path vime.rollout.openai_endpoint.generate
    --agent-function-path my_agent:solve            # async def solve(task) -> reward or None
    --agent-command "python my_agent.py"            # or a program

Every request is recorded token by token; see docs/en/advanced/agents-by-api.md.
"""

from vime.rollout.openai_endpoint.agents import Agent, AgentFailed, AgentResult, AgentTask, command_agent, play
from vime.rollout.openai_endpoint.entry import agent_of, generate
from vime.rollout.openai_endpoint.protocol import Refused
from vime.rollout.openai_endpoint.server import Endpoint
from vime.rollout.openai_endpoint.session import Session, Speaker

__all__ = [
    "Agent",
    "AgentFailed",
    "AgentResult",
    "AgentTask",
    "Endpoint",
    "Refused",
    "Session",
    "Speaker",
    "agent_of",
    "command_agent",
    "generate",
    "play",
]
