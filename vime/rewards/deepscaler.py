"""``math`` on what follows the thinking; a response without ``</think>`` is graded as a whole.

So a model that does not think is graded like one that does, instead of always getting 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.rewards import math
from vime.rewards.extract import after_thinking
from vime.types import Grade

grade_answer = math.grade_answer


def grade(response: str, label: str | None, metadata: Mapping[str, Any]) -> Grade:
    return math.grade(after_thinking(response), label, metadata)
