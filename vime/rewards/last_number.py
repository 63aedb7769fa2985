"""The last number of the response is exactly the label's number: 1 or 0.

1,000 = 1000, 34.0 = 34 and "34." = 34; a per-cent sign is not looked at. A fraction written as 3/4 is one number and
equals 0.75. Needs no sympy: the fastest grader, for tasks whose answers are numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.rewards.numbers import last_number
from vime.types import Grade, GradeStatus


def grade(response: str, label: str | None, metadata: Mapping[str, Any]) -> Grade:
    expected = last_number(label or "")
    if expected is None:
        return Grade.error(f"the label {label!r} holds no number")
    found = last_number(response)
    if found is None:
        return Grade(score=0.0, status=GradeStatus.INVALID, detail="there is no number in the response")
    return Grade(score=float(found == expected), detail=str(found.value))


grade_answer = grade
