"""Flags of agents, and of the grader that runs programs."""

from __future__ import annotations

import pytest

from vime.config import resolve
from vime.config.sections.agent import GENERATE

RUNS = ("--custom-generate-function-path", GENERATE)
FUNCTION = ("--agent-function-path", "a:b")


def test_one_agent_is_needed_and_enough(flags):
    needs_one = f"{GENERATE} needs one of --agent-function-path and --agent-command: what it shall run"
    assert resolve(flags(*RUNS)).violations == (needs_one,)
    assert resolve(flags(*RUNS, *FUNCTION, "--agent-command", "c")).violations == (needs_one,)
    assert resolve(flags(*RUNS, *FUNCTION, "--agent-timeout-s", "5", "--agent-samples", "longest")).violations == ()
    with_colon = ("--custom-generate-function-path", "vime.rollout.openai_endpoint:generate")
    assert resolve(flags(*with_colon, "--agent-command", "c")).violations == ()


def test_the_transcripts_of_a_sample_have_indices(flags):
    (violation,) = resolve(flags(*RUNS, *FUNCTION, "--agent-max-transcripts", "9000")).violations
    assert violation.startswith("--agent-max-transcripts must be at least 1 and at most 8192, not 9000")


@pytest.mark.parametrize("words", [FUNCTION, ("--agent-command", "c"), ("--agent-timeout-s", "5")])
def test_flags_of_agents_without_an_agent_are_refused(flags, words):
    (violation,) = resolve(flags(*words)).violations
    assert violation.startswith(f"{words[0]} has an effect with --custom-generate-function-path {GENERATE} only")


@pytest.mark.parametrize(("rm_type", "wants"), [("code", False), ("math", True)])
def test_the_grader_of_programs_needs_no_label(flags, rm_type, wants):
    words = flags("--rm-type", rm_type)
    at = words.index("--label-key")
    violations = resolve(words[:at] + words[at + 2 :]).violations
    assert bool(violations) == wants
