"""The "Answer:" line within the last 300 characters, compared with the label as mathematics: +1 or -1.

``extra`` holds ``acc`` (whether it is right) and ``pred`` (the answer as found), as DAPO's own grader reports them.
The label may be of any kind, not only an integer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.rewards.equality import compare, one_line
from vime.rewards.extract import answer_line
from vime.types import Grade, GradeStatus

TAIL_CHARS = 300
NO_ANSWER = "[INVALID]"


def grade(response: str, label: str | None, metadata: Mapping[str, Any]) -> Grade:
    answer = answer_line(response[-TAIL_CHARS:])
    if answer is not None:
        return grade_answer(answer, label, metadata)
    return Grade(
        score=-1.0,
        status=GradeStatus.INVALID,
        detail=f'no "Answer:" in the last {TAIL_CHARS} characters',
        extra={"acc": False, "pred": NO_ANSWER},
    )


def grade_answer(answer: str, label: str | None, metadata: Mapping[str, Any]) -> Grade:
    compared = compare(answer, label)
    if compared.status is GradeStatus.ERROR:
        return compared
    right = compared.score == 1.0
    extra = {"acc": right, "pred": one_line(answer)}
    return Grade(score=1.0 if right else -1.0, status=compared.status, detail=compared.detail, extra=extra)
