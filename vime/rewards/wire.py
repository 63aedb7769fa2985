"""Grades as JSON, for grader processes and checkpoints."""

from __future__ import annotations

from typing import Any

from vime.types import Grade, GradeStatus

DEADLINE_VARIABLE = "VIME_GRADING_DEADLINE_S"
"""Tells a grader process, by environment, how long its parent waits for one grading."""


def grade_to_json(grade: Grade) -> dict[str, Any]:
    return {"score": grade.score, "status": grade.status.value, "detail": grade.detail, "extra": grade.extra}


def grade_from_json(record: dict[str, Any]) -> Grade:
    return Grade(
        score=record["score"],
        status=GradeStatus(record["status"]),
        detail=record["detail"],
        extra=record["extra"],
    )
