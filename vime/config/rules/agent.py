"""Agents that speak with the engines by OpenAI's API."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from vime.config.config import Config
from vime.config.rules.base import Violation, option
from vime.config.sections.agent import GENERATE, Agent


def agents(config: Config) -> Iterator[Violation]:
    """One agent where our generate function runs it, and none where it does not."""
    agent = config.agent
    if config.runs_agents:
        if (agent.agent_function_path is None) == (agent.agent_command is None):
            yield Violation(f"{GENERATE} needs one of --agent-function-path and --agent-command: what it shall run")
        return
    for field in dataclasses.fields(Agent):
        if getattr(agent, field.name) != field.default:
            yield Violation(
                f"{option(field.name)} has an effect with --custom-generate-function-path {GENERATE} only: set that "
                "too, or leave it out"
            )


RULES = (agents,)
