r"""The letter that a response chooses among several answers, compared with the label's: 1 or 0.

The choice is looked for in this order, after the reasoning: the last ``\boxed{C}``; the last statement such as "the
answer is (C)", "**Answer:** C" or "option C is correct"; a last line that is a letter or begins with one ("C) Paris");
the only letter in parentheses; the text of one of ``metadata["choices"]``. Two letters at once ("A or B") choose
neither, and what a response merely discusses is no choice.

The label is a letter, or the text of one of the choices. ``metadata["choices"]`` is a list of texts, or a dict from
letters to texts; without it letters go up to D, or to the label's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vime.rewards.equality import one_line
from vime.rewards.extract import after_thinking, last_boxed
from vime.types import Grade, GradeStatus

SEVERAL = "?"
_USUAL = 4  # choices of a question that does not say how many it has
_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed|fbox)\s*(?=\{)|\\[()\[\]!,]|[*_$`{}]")
_LETTER = r"[(\[]?(?P<letter>[A-Z])[)\]]?(?![\w'’]|-\w)"
_NEXT = re.compile(
    r"\s*(?:,|/|&|(?i:and|or)\b)\s*(?i:(?:option|choice)\s+)?[(\[]?[A-Z][)\]]?+(?![\w'’])"
    r"(?!\s(?i:is|was|isn['’]t|wasn['’]t|does|doesn['’]t|has|can|cannot|could|would|fails?|seems?|contradicts)\b)"
)
"""One more letter; not where it begins another sentence: "the answer is C and A is wrong"."""

_END = r"(?=\s*(?:[.,;!?)\n]|$))"
_IS = r"(?i:\s*(?:(?:is|was|are|would\s+be|must\s+be|should\s+be|[:：=]|->|→)\s*)+)"
_NOUN = r"(?i:(?:the\s+|my\s+)?(?:(?:correct|right|best|final)\s+)?(?:option|choice|letter|answer)?\s*)"
_STATEMENTS = (
    rf"(?i:\banswers?){_IS}{_NOUN}{_LETTER}",
    rf"(?i:\b(?:correct|right|best)\s+(?:option|choice|one|letter)){_IS}{_NOUN}{_LETTER}",
    rf"(?i:\b(?:choose|pick|select)\s+(?:option|choice|answer)?\s*){_LETTER}",
    rf"(?:(?i:\b(?:option|choice|answer)\s+)|(?<![\w'’-])){_LETTER}\s+(?i:is|would\s+be)\s+"
    r"(?i:(?:the\s+|my\s+)?(?:final\s+)?(?:answer\b|(?:correct|right|best)"
    rf"(?:{_END}|\s+(?:answer|option|choice|one|letter|because|since|as|for|here)\b)))",
    rf"(?i:\banswers?){_IS}(?i:not\s+)[(\[]?[A-Z][)\]]?\s*,?\s*(?i:but\s+){_NOUN}{_LETTER}",
    rf"(?i:\bit(?:['’]s|\s(?:is|must\sbe|should\sbe|would\sbe))\s){_NOUN}{_LETTER}{_END}",
    rf"(?i:\b(?:therefore|thus|hence|so|final(?:\s(?:answer|choice))?)\s*[,:：]?\s){_NOUN}{_LETTER}{_END}",
)
_STATEMENT = re.compile("|".join(f"(?:{each.replace('letter', f'letter{i}')})" for i, each in enumerate(_STATEMENTS)))
_LOWER_LINE = re.compile(r"(?im)\banswer\s*(?:is\s*|[:：]\s*)+\(?([a-z])\)?\s*\.?\s*$")
_LINE = re.compile(
    rf"\s*(?i:option\s+|choice\s+)?(?:{_LETTER}[.:]?\s*$|[(\[]?(?P<listed>[A-Z])(?P<mark>[)\].:])\s+\S.*)"
)
_IN_PARENTHESES = re.compile(r"\(([A-Z])\)")


Choose = Callable[[str, str, Mapping[str, str]], str | None]
"""(text, letters, choices) → the chosen letter."""


def grade(response: str, label: str | None, metadata: Mapping[str, Any]) -> Grade:
    return _grade(after_thinking(response), label, metadata, chosen_letter)


def grade_answer(answer: str, label: str | None, metadata: Mapping[str, Any]) -> Grade:
    return _grade(answer, label, metadata, _of_box)


def _grade(text: str, label: str | None, metadata: Mapping[str, Any], choose: Choose) -> Grade:
    try:
        choices = _choices(metadata.get("choices"))
        right = _right_letter(label, choices)
    except ValueError as error:
        return Grade.error(str(error))
    letters = "".join(choices) or _alphabet(max(_USUAL, ord(right) - ord("A") + 1))
    chosen = choose(text, letters, choices)
    if chosen is None:
        return Grade(score=0.0, status=GradeStatus.INVALID, detail="no choice of a letter was found")
    return Grade(score=float(chosen == right), detail=chosen)


def chosen_letter(text: str, letters: str, choices: Mapping[str, str]) -> str | None:
    """The letter, of those there are, that a text chooses; None where it chooses none or several at once."""
    boxed = last_boxed(text)
    if boxed is not None:
        return _of_box(boxed, letters, choices)
    plain = _flat(text)
    for found in (_stated(plain), _of_last_line(plain), _only_one(plain)):
        if found:
            return found if found in letters else None
    return _of_text(text, choices)


def _of_box(content: str, letters: str, choices: Mapping[str, str]) -> str | None:
    plain = _flat(content).strip()
    whole = re.fullmatch(r"[(\[]?([A-Za-z])[)\]]?[.:]?", plain)
    if whole:
        return whole[1].upper() if whole[1].upper() in letters else None
    found = _stated(plain) or _of_last_line(plain)
    return found if found and found in letters else _of_text(content, choices)


def _flat(text: str) -> str:
    """Without markup and with runs of blanks as one: patterns that skip blanks then take time in proportion."""
    blanks = re.sub(r"[^\S\n]+", " ", _MARKUP.sub("", text))
    return re.sub(r"(?: ?\n ?)+", "\n", blanks)


def _stated(plain: str) -> str | None:
    """The letter of the last statement that names one; ``SEVERAL`` where it names more."""
    statements = list(_STATEMENT.finditer(plain))
    small = list(_LOWER_LINE.finditer(plain))
    if small and (not statements or small[-1].end() > statements[-1].end()):
        return small[-1][1].upper()
    if not statements:
        return None
    last = statements[-1]
    letter = next(value for name, value in last.groupdict().items() if value is not None)
    return SEVERAL if _NEXT.match(plain, last.end()) else letter


def _of_last_line(plain: str) -> str | None:
    lines = plain.strip().splitlines()
    found = _LINE.fullmatch(lines[-1]) if lines else None
    if found is None:
        return None
    return found["letter"] or (SEVERAL if _NEXT.match(lines[-1], found.end("mark")) else found["listed"])


def _only_one(plain: str) -> str | None:
    found = set(_IN_PARENTHESES.findall(plain))
    return found.pop() if len(found) == 1 else None


def _of_text(text: str, choices: Mapping[str, str]) -> str | None:
    """The choice that a text is, or that alone stands in it."""
    said = _plain(text)
    equal = [letter for letter, choice in choices.items() if _plain(choice) == said]
    inside = [letter for letter, choice in choices.items() if f" {_plain(choice)} " in f" {said} "]
    found = equal or inside
    return found[0] if len(found) == 1 else None


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[^\w\s.+-]", " ", text.lower()).strip(" .").split())


def _choices(given: Any) -> dict[str, str]:
    if given is None:
        return {}
    if isinstance(given, Sequence) and not isinstance(given, str) and 0 < len(given) <= 26:
        given = dict(zip(_alphabet(len(given)), given, strict=True))
    if not isinstance(given, Mapping) or not all(re.fullmatch("[A-Z]", str(letter)) for letter in given):
        shown = one_line(repr(given), 80)
        raise ValueError(f'metadata["choices"] must be a list of texts or a dict of A, B, …, not {shown}')
    return {str(letter): str(text) for letter, text in given.items()}


def _right_letter(label: str | None, choices: Mapping[str, str]) -> str:
    text = (label or "").strip()
    letter = re.fullmatch(r"[(\[]?([A-Za-z])[)\]]?\.?", text)
    if letter and (not choices or letter[1].upper() in choices):
        return letter[1].upper()
    named = [key for key, choice in choices.items() if _plain(choice) == _plain(text)]
    if len(named) != 1:
        among = " and none of the choices" if choices else ""
        raise ValueError(f"the label {label!r} is no letter{among}")
    return named[0]


def _alphabet(count: int) -> str:
    return "".join(chr(ord("A") + place) for place in range(count))
