"""The names of ``--rm-type`` and the graders behind them. Graders are imported when they are first used.

``boxed_NAME`` takes the content of the last box and gives it to the grader as the final answer.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from vime.errors import UserError
from vime.rewards.extract import last_boxed
from vime.types import Grade, GradeStatus

GradeFunction: TypeAlias = Callable[[str, str | None, Mapping[str, Any]], Grade]
"""(response, label, metadata) → Grade. Pure: no clock, no network, no state."""

LOCAL = ("math", "deepscaler", "dapo", "last_number", "f1", "gpqa", "ifbench", "code")
"""Graders that run in the process pool: modules of this package with ``grade`` and ``grade_answer``."""

CODE = "code"
IFBENCH = "ifbench"
WITHOUT_LABEL = (CODE, IFBENCH)
"""What they look for in a response stands in the metadata, or may."""

REMOTE = "remote_rm"
BOXED = "boxed_"


def check(rm_type: str, source: str = "--rm-type") -> None:
    """Raises UserError, with the nearest name, where there is no such grader."""
    known = [*LOCAL, REMOTE]
    if rm_type.removeprefix(BOXED) in known:
        return
    near = difflib.get_close_matches(rm_type, [*known, *(BOXED + name for name in known)], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UserError(f"{source}: there is no grader {rm_type!r}, only {', '.join(known)} and {BOXED}NAME{hint}")


def needs_label(rm_type: str) -> bool:
    """Whether a prompt without a label cannot be graded. A reward service may do without."""
    return is_local(rm_type) and rm_type.removeprefix(BOXED) not in WITHOUT_LABEL


def is_local(rm_type: str) -> bool:
    """Whether the grader runs in the process pool."""
    return rm_type.removeprefix(BOXED) in LOCAL


def address_space(rm_types: Iterable[str]) -> int:
    """Bytes that a process of the pool may map to run these graders."""
    wide = any(rm_type.removeprefix(BOXED) == IFBENCH for rm_type in rm_types)  # it imports pandas and pyarrow
    return 4 << 30 if wide else 1 << 30


def load(rm_type: str) -> GradeFunction:
    """The function of a local grader.

    Raises:
        UserError: there is no such grader, or it does not run locally.
    """
    check(rm_type)
    name = rm_type.removeprefix(BOXED)
    if name == REMOTE:
        raise UserError(f"{REMOTE} asks a service and has no local grader")
    module = importlib.import_module(f"vime.rewards.{name}")
    grade_answer: GradeFunction = module.grade_answer
    grade: GradeFunction = module.grade
    return _boxed(grade_answer) if rm_type.startswith(BOXED) else grade


def _boxed(grade_answer: GradeFunction) -> GradeFunction:
    def grade(response: str, label: str | None, metadata: Mapping[str, Any]) -> Grade:
        answer = last_boxed(response)
        if answer is None:
            return Grade(score=0.0, status=GradeStatus.INVALID, detail=r"there is no answer in a \boxed{}")
        return grade_answer(answer, label, metadata)

    return grade
