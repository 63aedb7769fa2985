"""Whether a response follows all instructions of IFBench and IFEval that its row names: 1 or 0.

The row's metadata has ``instruction_id_list``, names such as "count:word_count_range", and ``kwargs``, the arguments of
each, as the rows of those benchmarks have them (https://arxiv.org/abs/2507.02833, https://arxiv.org/abs/2311.07911).
``extra`` holds ``loose`` (1 where a version without the first or last line or the emphasis marks follows all) and
``fraction`` and ``loose_fraction`` of the instructions that are followed; --reward-key can name one.

The checks are those of the package if-verifiable (``pip install "vime[ifbench]"``). Some need data of NLTK, which is
never downloaded here: what is missing is an error that says how to get it.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vime.errors import UserError
from vime.rewards.equality import one_line
from vime.rewards.extract import after_thinking
from vime.types import Grade, GradeStatus

MISSING = 'the grader ifbench needs the package if-verifiable, which is not installed: pip install "vime[ifbench]"'


def grade(response: str, label: str | None, metadata: Mapping[str, Any]) -> Grade:
    return grade_answer(after_thinking(response), label, metadata)


def grade_answer(answer: str, label: str | None, metadata: Mapping[str, Any]) -> Grade:
    names, arguments = metadata.get("instruction_id_list"), metadata.get("kwargs")
    problem = _problem(names, arguments)
    if problem is not None:
        return Grade.error(problem)
    if not answer.strip():
        return Grade(score=0.0, status=GradeStatus.INVALID, detail="the response is empty")
    from if_verifiable.common import evaluate_instructions

    try:
        results, scores = evaluate_instructions(answer, names, arguments, "", _CHECKS)
    except LookupError as error:  # NLTK's, of many lines
        return Grade.error(_missing_data(error))
    failed = [result.instruction_id for result in results if not result.strict_pass]
    return Grade(
        score=scores.binary_strict,
        detail=f"not followed: {', '.join(failed)}" if failed else "",
        extra={
            "loose": scores.binary_loose,
            "fraction": scores.partial_strict,
            "loose_fraction": scores.partial_loose,
        },
    )


def _problem(names: Any, arguments: Any) -> str | None:
    """What is wrong with the instructions of a row."""
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        return f'metadata["instruction_id_list"] must be a list of names, not {one_line(repr(names), 80)}'
    if not isinstance(arguments, list) or not all(isinstance(each, Mapping) for each in arguments):
        return f'metadata["kwargs"] must be a list of objects, not {one_line(repr(arguments), 80)}'
    if len(arguments) != len(names):
        return f'metadata["kwargs"] has {len(arguments)} entries for {len(names)} instructions'
    for name in names:
        if name not in _CHECKS:
            near = difflib.get_close_matches(name, _CHECKS, n=1)
            return f"there is no instruction {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    return None


def _load_checks() -> Mapping[str, Any]:
    """All checks of both benchmarks, by name.

    Raises:
        UserError: the package is not installed.
    """
    if importlib.util.find_spec("if_verifiable") is None:
        raise UserError(MISSING)
    with _no_downloads():
        from if_verifiable.ifbench import instructions_registry as ifbench
        from if_verifiable.ifeval import instructions_registry as ifeval
        from langdetect import DetectorFactory

    DetectorFactory.seed = 0  # it guesses languages by chance otherwise
    return {**ifeval.INSTRUCTION_DICT, **ifbench.INSTRUCTION_DICT}


@contextmanager
def _no_downloads() -> Iterator[None]:
    """if-verifiable 0.1.2 calls ``nltk.download`` when it is imported (``ifbench/instructions_util.py``, at the end of
    ``download_nltk_resources``) and goes on without what it does not get; so there is nothing to get for that long."""
    import nltk

    download = nltk.download
    nltk.download = lambda *_, **__: False
    try:
        yield
    finally:
        nltk.download = download


def _missing_data(error: LookupError) -> str:
    found = re.search(r"nltk\.download\('([\w-]+)'\)", str(error))
    if found is None:
        return f"an instruction raised {type(error).__name__}: {one_line(str(error), 200)}"
    return f"an instruction needs data of NLTK: python -m nltk.downloader {found[1]}"


_CHECKS = _load_checks()  # now, because importing takes seconds and the deadline of a grading does not run yet
