"""How answers are graded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vime.config.flags import derived, flag

BUILT_IN = ("math", "deepscaler", "dapo", "last_number", "f1", "gpqa", "ifbench", "code", "remote_rm")
"""Graders of this version; see ``vime.rewards``. The prefix boxed_ takes the content of the last box first."""

WITHOUT_LABEL = ("ifbench", "code", "remote_rm")
"""Those that may do without a label."""

RM_TYPES = (*BUILT_IN, *(f"boxed_{name}" for name in BUILT_IN))


def needs_label(rm_type: str) -> bool:
    """Whether a prompt without a label cannot be graded."""
    return rm_type.removeprefix("boxed_") not in WITHOUT_LABEL


@dataclass(frozen=True, kw_only=True)
class Reward:
    """Graders run in processes that can be killed; a deadline that passed is an error, never a 0."""

    rm_type: str | None = flag(
        None,
        choices=RM_TYPES,
        instead={"random": "random rewards teach nothing; a function of your own comes by --custom-rm-path"},
        help="The grader. A boxed_ prefix grades the last box only.",
    )
    rm_url: str | None = flag(None, help="Address of the reward service of remote_rm.")
    reward_key: str | None = flag(None, help="Which value of a dict reward is trained on.")
    eval_reward_key: str | None = derived("reward-key", help="Which value of a dict reward is reported by evaluations.")
    group_rm: bool = flag(False, help="Grade a whole group at once: --custom-rm-path gets the list of its samples.")
    rm_timeout_s: float = flag(
        10.0,
        help="Deadline of grading one answer, in seconds; with remote_rm that of one try, 120 where it is not given.",
    )
    rm_code_score: Literal["all", "fraction"] = flag(
        "all", help="What the grader code gives: 1 where all tests pass, or the fraction that does."
    )
    rm_code_sandbox: str = flag(
        "auto",
        help="Where the grader code runs programs: auto, namespaces, user_namespaces or process on this machine (see "
        "docs/en/advanced/sandbox.md), or the address of a service.",
    )
    rm_workers: int = derived("half of the cores, 1 to 8", help="Processes that grade answers.")
