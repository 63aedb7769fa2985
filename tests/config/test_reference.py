"""What the help says of flags."""

from __future__ import annotations

import pytest

from vime.config import help_text, resolve
from vime.config.config import OWN_FLAGS
from vime.config.rules.supported import ONLY


def said(option: str) -> list[str]:
    """The lines of one flag, without those of the next."""
    lines = help_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.split()[:1] == [option])
    end = next(number for number in range(start + 1, len(lines)) if not lines[number].startswith("      "))
    return [line.strip() for line in lines[start:end]]


@pytest.mark.parametrize(
    ("option", "head"),
    [
        (
            "--lr-decay-style",
            "--lr-decay-style  one of constant, linear, cosine, inverse-square-root  (default: constant)",
        ),
        ("--rollout-batch-size", "--rollout-batch-size  a whole number  (required)"),
        ("--eps-clip-high", "--eps-clip-high  a number  (default: eps-clip)"),
        ("--load", "--load  a text"),
        ("--colocate", "--colocate"),  # a switch that is off takes nothing
        ("--offload-rollout", "--offload-rollout  (default: under --colocate or --offload)"),
    ],
)
def test_a_flag_stands_with_what_it_takes_and_its_default(option, head):
    assert said(option)[0] == head


def test_lines_fit_100_columns():
    assert max(map(len, help_text().splitlines())) <= 100


@pytest.mark.parametrize("name", ONLY)
def test_what_this_version_refuses_is_said(name):
    assert "This version" in " ".join(said(OWN_FLAGS[name].option))


def test_what_it_takes_of_the_others_is_said():
    assert said("--attention-backend")[1:] == [
        "Implementation of attention; auto takes the best that is installed. This version takes auto",
        "only.",
    ]


@pytest.mark.parametrize(
    "words",
    ["--check-weight-update-equal", "--vllm-weight-sync-packed", "--qkv-format thd", "--recompute-loss-function"],
)
def test_flags_that_ask_for_what_is_always_done_change_nothing(flags, words):
    resolution = resolve(flags(*words.split()))
    assert (resolution.violations, resolution.warnings) == ((), ())
