r"""The last ``\boxed{…}`` of the response, compared with the label as mathematics: 1 or 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.rewards.equality import compare
from vime.rewards.extract import last_boxed
from vime.types import Grade, GradeStatus


def grade(response: str, label: str | None, metadata: Mapping[str, Any]) -> Grade:
    answer = last_boxed(response)
    if answer is None:
        return Grade(score=0.0, status=GradeStatus.INVALID, detail=r"there is no answer in a \boxed{}")
    return compare(answer, label)


def grade_answer(answer: str, label: str | None, metadata: Mapping[str, Any]) -> Grade:
    return compare(answer, label)
