"""Agents that speak with the engines by OpenAI's API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vime.config.flags import flag

GENERATE = "vime.rollout.openai_endpoint.generate"
"""The --custom-generate-function-path that runs them."""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """What ``vime.rollout.openai_endpoint.generate`` runs, and how: docs/en/advanced/agents-by-api.md."""

    agent_function_path: str | None = flag(
        None, help="The agent, package.module:function: async f(task) -> its reward, a dict, or nothing."
    )
    agent_command: str | None = flag(
        None, help="The agent as a program, which finds the endpoint in OPENAI_BASE_URL and OPENAI_API_KEY."
    )
    agent_timeout_s: float = flag(600.0, help="Deadline of an agent for one sample; what it has said by then counts.")
    agent_samples: Literal["all", "longest"] = flag(
        "all", help="Which transcripts of an agent are trained on, where it leads several dialogues."
    )
    agent_sampling: Literal["refuse", "ignore"] = flag(
        "refuse", help="What becomes of requests for another temperature, top_p or top_k than the run's."
    )
    agent_call_format: str | None = flag(
        None,
        choices=("hermes", "llama3", "mistral", "glm", "fenced"),
        help="How the model calls tools, where its chat template does not tell.",
    )
    agent_max_transcripts: int = flag(64, help="Which one sample may begin; further requests that begin one get 400.")
    agent_host: str = flag("127.0.0.1", help="Address at which the endpoint listens; 0.0.0.0: all of the machine's.")
    agent_advertise: str | None = flag(
        None, help="Address at which agents find the endpoint, where that is not --agent-host or the machine's own."
    )
    agent_port: int = flag(0, help="Port at which agents find the endpoint; 0: any.")
