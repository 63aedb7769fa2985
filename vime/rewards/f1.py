"""How much an answer's words overlap with those of the right one: the F1 of SQuAD, from 0 to 1.

``extra`` holds ``precision``, ``recall`` and ``exact`` (1 where the normalised answers are equal). Texts are compared
without case, punctuation and the articles a, an and the: https://arxiv.org/abs/1606.05250, section 6.1. Yes and no are
answers that overlap with nothing but themselves, as in HotpotQA (https://arxiv.org/abs/1809.09600).

What follows the reasoning is the answer; ``boxed_f1`` takes the content of the last box. A row with several right
answers has the others in ``metadata["answers"]``; the best match counts.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import Any

from vime.rewards.equality import one_line
from vime.rewards.extract import after_thinking
from vime.types import Grade, GradeStatus

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ALONE = frozenset({"yes", "no", "noanswer"})


def grade(response: str, label: str | None, metadata: Mapping[str, Any]) -> Grade:
    return grade_answer(after_thinking(response), label, metadata)


def grade_answer(answer: str, label: str | None, metadata: Mapping[str, Any]) -> Grade:
    others = metadata.get("answers", [])
    if not isinstance(others, list) or not all(isinstance(each, str) for each in others):
        return Grade.error(f'metadata["answers"] must be a list of texts, not {one_line(repr(others), 80)}')
    right = [text for text in (label, *others) if text is not None]
    if not right:
        return Grade.error("there is no label to compare with")
    f1, precision, recall, exact = max(overlap(answer, text) for text in right)
    status = GradeStatus.SCORED if answer.strip() else GradeStatus.INVALID
    extra = {"precision": precision, "recall": recall, "exact": exact}
    return Grade(score=f1, status=status, detail=one_line(answer), extra=extra)


def overlap(answer: str, right: str) -> tuple[float, float, float, float]:
    """(F1, precision, recall, whether they are equal) of the words of two texts."""
    found, wanted = words(answer), words(right)
    equal = float(found == wanted)
    alone = {tuple(found), tuple(wanted)} & {(word,) for word in _ALONE}
    if not wanted:  # a label of punctuation alone
        equal = float(answer.strip() == right.strip())
    if alone or not found or not wanted:
        return equal, equal, equal, equal
    common = (Counter(found) & Counter(wanted)).total()
    precision, recall = common / len(found), common / len(wanted)
    f1 = 2 * precision * recall / (precision + recall) if common else 0.0
    return f1, precision, recall, equal


def words(text: str) -> list[str]:
    """The words of a text that count; articles do where there is nothing else."""
    kept = "".join(char for char in text.lower() if not _is_punctuation(char))
    return _ARTICLES.sub(" ", kept).split() or kept.split()


def _is_punctuation(char: str) -> bool:
    return char in string.punctuation or unicodedata.category(char).startswith("P")
