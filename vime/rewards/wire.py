"""Grades as JSON, for grader processes and checkpoints."""

from __future__ import annotations

from typing import Any

from vime.types import Grade, GradeStatus


def grade_to_json(grade: Grade) -> dict[str, Any]:
    return {"score": grade.score, "status": grade.status.value, "detail": grade.detail, "extra": grade.extra}


def grade_from_json(record: dict[str, Any]) -> Grade:
    return Grade(
        score=record["score"],
        status=GradeStatus(record["status"]),
        detail=record["detail"],
        extra=record["extra"],
    )
