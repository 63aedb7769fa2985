r"""Whether two answers are the same mathematics.

The order matters: text first, then exact numbers, then words, and only what is left goes to math-verify (sympy). So
integers beyond 2^53 are compared digit by digit, 0.333 is not 1/3, "listen" is not "silent" (as products of letters
they would be equal), and most answers never load sympy.

An irrational answer may be compared with a decimal: there math-verify's six decimals decide.
"""

from __future__ import annotations

import re

from vime.rewards.extract import last_boxed
from vime.rewards.numbers import parse_number
from vime.types import Grade, GradeStatus

MAX_ANSWER_CHARS = 2000  # nobody's final answer is longer, and the LaTeX parser is slow

_QUOTES = ('""', "''", "“”", "``")
_WRAPPERS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox)\s*\{([^{}]*)\}")
_FORMULA = re.compile(r"\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
_EMPHASIS = re.compile(r"(\*\*|__)(.+)\1", re.DOTALL)
_SPACING = re.compile(r"(?<!\\)\\[,;:! ]|~")
_DEGREES = re.compile(r"\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*$|\s*°\s*$")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' \-]*")
_FUNCTIONS = re.compile(r"(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|log|exp|sqrt|min|max|gcd|lcm", re.IGNORECASE)
_POWER = re.compile(r"\*\*\s*(\((?:[^()]|\([^()]*\))*\)|-?[\w.]+)((?:\^\{.*\})?)")
_REPLACED = {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "²": "^2", "³": "^3"}


def compare(answer: str, label: str | None) -> Grade:
    """Grades a final answer: 1 where it equals the label, else 0."""
    if label is None or not label.strip():
        return Grade.error("there is no label to compare with")
    detail = one_line(answer)
    if not answer.strip():
        return Grade(score=0.0, status=GradeStatus.INVALID, detail="the answer is empty")
    return Grade(score=float(same_answer(answer, label)), detail=detail)


def one_line(text: str, limit: int = 200) -> str:
    """``text`` on one line, cut to ``limit`` characters."""
    line = " ".join(text[: limit * 4].split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def same_answer(answer: str, label: str) -> bool:
    """Whether ``answer`` equals ``label``. May need unbounded time: run it where it can be killed."""
    answer, label = clean(answer), clean(label)
    if not answer or not label:
        return False
    if _without_spaces(answer) == _without_spaces(label):
        return True
    ours, theirs = parse_number(answer), parse_number(label)
    if ours is not None and theirs is not None:
        return ours.same_as(theirs)
    if _is_words(answer) or _is_words(label):
        return _words(answer) == _words(label)
    return len(answer) <= MAX_ANSWER_CHARS and _same_mathematics(answer, label)


def clean(text: str) -> str:
    """An answer without what surrounds it: quotes, dollars, boxes, text wrappers, a final full stop, degrees."""
    for sign, replacement in _REPLACED.items():
        text = text.replace(sign, replacement)
    before = None
    while text != before:
        before = text
        text = _strip_once(text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text).replace("{,}", ",").replace(r"\%", "%")
    return _SPACING.sub(_thin_space, text).strip()


def _strip_once(text: str) -> str:
    text = text.strip()
    if len(text) >= 2 and text[0] + text[-1] in _QUOTES:
        text = text[1:-1]
    text = text.replace(r"\$", "").replace("$", "")
    for pattern in (_WRAPPERS, _FORMULA, _EMPHASIS):
        if whole := pattern.fullmatch(text.strip()):
            text = whole[whole.lastindex or 0]
    if text.lstrip().startswith((r"\boxed", r"\fbox")):
        text = last_boxed(text) or text
    text = _DEGREES.sub("", text)
    return text[:-1] if text.endswith(".") and not text.endswith((r"\right.", "..")) else text


def _thin_space(space: re.Match[str]) -> str:
    r"""``1\,000`` is a number with a thin space; elsewhere the space separates."""
    before, after = space.string[: space.start()][-1:], space.string[space.end() :][:1]
    return "" if before.isdigit() and after.isdigit() else " "


def _without_spaces(text: str) -> str:
    return "".join(text.split()) if not _is_words(text) else _words(text)


def _is_words(text: str) -> bool:
    """Whether this is language rather than a product of variables: a run of three or more letters tells."""
    runs = re.findall(r"[A-Za-z]+", text)
    return bool(_WORDS.fullmatch(text)) and any(len(run) >= 3 and not _FUNCTIONS.fullmatch(run) for run in runs)


def _words(text: str) -> str:
    return " ".join(text.casefold().split())


def _same_mathematics(answer: str, label: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify

    # The whole text or nothing: with plain-expression extraction "9**9" would be read as its last number. No time
    # limits of math-verify's own (they need signals): whoever calls this can kill the process.
    config = [LatexExtractionConfig(boxed_match_priority=-1)]
    gold, target = (
        parse(f"${_latex_powers(text)}$", extraction_config=config, parsing_timeout=None) for text in (label, answer)
    )
    return bool(verify(gold, target, timeout_seconds=None))


def _latex_powers(text: str) -> str:
    """Python's ``a**b`` as LaTeX's ``a^{b}``, from the right, as Python reads it."""
    while powers := list(_POWER.finditer(text)):
        last = powers[-1]
        text = f"{text[: last.start()]}^{{{last[1]}{last[2]}}}{text[last.end() :]}"
    return text
