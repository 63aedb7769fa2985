r"""Whether two answers are the same mathematics.

The order matters: text first, then exact numbers, units, words, and only what is left goes to math-verify (sympy). So
integers beyond 2^53 are compared digit by digit, 0.333 is not 1/3, "listen" is not "silent" (as products of letters
they would be equal), and most answers never load sympy.

An irrational answer may be compared with a decimal: there math-verify's six decimals decide.
"""

from __future__ import annotations

import re

from vime.rewards.extract import last_boxed
from vime.rewards.numbers import parse_number, plain
from vime.rewards.units import names_more, quantity
from vime.types import Grade, GradeStatus

MAX_ANSWER_CHARS = 2000  # nobody's final answer is longer, and the LaTeX parser is slow

_QUOTES = ('""', "''", "“”", "``")
_WRAPPERS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox)\s*\{([^{}]*)\}")
_FORMULA = re.compile(r"\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
_EMPHASIS = re.compile(r"(\*\*|__)(.+)\1", re.DOTALL)
_SPACING = re.compile(r"(?<!\\)\\[,;:! ]|~")
_THOUSANDS = re.compile(r"(?<![\d.,^])\d{1,3}(?: \d{3})+(?!\d)")
_DECIMALS = re.compile(r"(?<=\.)(?:\d{3}\\,)+\d{1,3}(?!\d)")
_APART = re.compile(r"(?<![\d_^])\d+\s+\d")  # but for a subscript or exponent of one digit
_MIXED = re.compile(r"(?<![\d.,/^])(\d{1,9})\s+(\d{1,9})\s*/\s*(\d{1,9})(?![\d.])")
_UNBRACED = re.compile(r"\\(frac|binom)\s*(\d)\s*(\d)(?!\d)")
_DEGREES = re.compile(r"\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*$|\s*°\s*$")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' \-]*")
_FUNCTIONS = re.compile(r"(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|log|exp|sqrt|min|max|gcd|lcm", re.IGNORECASE)
_POWER = re.compile(r"\*\*\s*(\((?:[^()]|\([^()]*\))*\)|-?[\w.]+)((?:\^\{.*\})?)")
_REPLACED = {
    "×": r"\times ",
    "·": r"\cdot ",
    "π": r"\pi ",
    "∞": r"\infty ",
    r",\!": ",",
    "\u2009": r"\,",
    "\u202f": r"\,",
}


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
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    counted, wanted = quantity(answer), quantity(label)
    if counted and wanted:
        return counted[1] == wanted[1] and _same_value(counted[0], wanted[0])
    answer, label = _summed(answer), _summed(label)
    if _APART.search(answer) or _APART.search(label):
        return False  # several numbers, which math-verify would read as one
    return _same_mathematics(answer, label)


def _same_value(answer: str, label: str) -> bool:
    """Of what stands before a unit: ``2 ft 3`` and ``3 ft 2`` are no products."""
    if names_more(answer) or names_more(label):
        return _without_spaces(answer) == _without_spaces(label)
    return same_answer(answer, label)


def _summed(text: str) -> str:
    """Mixed numbers as sums, which math-verify would read as products."""

    def summed(mixed: re.Match[str]) -> str:
        whole, above, below = mixed.groups()
        return f"({whole}+{above}/{below})" if int(above) < int(below) else mixed[0]

    return _MIXED.sub(summed, text)


def clean(text: str) -> str:
    """An answer without what surrounds it: quotes, dollars, boxes, text wrappers, a final full stop, degrees."""
    for sign, replacement in _REPLACED.items():
        text = text.replace(sign, replacement)
    text = plain(text)
    before = None
    while text != before:
        before = text
        text = _strip_once(text)
    text = re.sub(r"\\[dtc](frac|binom)(?![A-Za-z])", r"\\\1", text).replace("{,}", ",").replace(r"\%", "%")
    text = _SPACING.sub(" ", _DECIMALS.sub(lambda digits: digits[0].replace(r"\,", ""), text)).strip()
    text = _UNBRACED.sub(r"\\\1{\2}{\3}", text)
    return _THOUSANDS.sub(lambda digits: digits[0].replace(" ", ""), text)


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


def _without_spaces(text: str) -> str:
    """Spaces say nothing in mathematics, except between digits."""
    if _is_words(text):
        return _words(text)
    return re.sub(r"(?<!\d) | (?!\d)", "", " ".join(text.split()))


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
