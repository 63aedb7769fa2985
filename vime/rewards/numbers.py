r"""Numbers read exactly, without floating point: integers of any size, decimals, fractions, per cent.

``1,000``, ``1 000``, ``1{,}000`` and ``1\,000`` are one thousand.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_INTEGER = r"(?:\d{1,3}(?:[ ,]\d{3})+|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{{1,3}})?"
_NUMBER = re.compile(rf"(?P<sign>[+-]?)\s*(?P<value>{_DECIMAL})\s*(?P<percent>%?)")
_FRACTION = re.compile(rf"(?P<sign>[+-]?)\s*(?P<above>{_INTEGER})\s*/\s*(?P<below>[+-]?{_INTEGER})")
_LATEX_FRACTION = re.compile(
    r"(?P<sign>[+-]?)\s*\\frac\s*(?:\{(?P<above>\s*[+-]?\d+\s*)\}|(?P<above1>\d))\s*"
    r"(?:\{(?P<below>\s*[+-]?\d+\s*)\}|(?P<below1>\d))"
)
# In running text a minus is a sign only where no operand stands before it: "5-3" ends in 3, "= -3" in -3.
_IN_TEXT = re.compile(
    r"(?:(?<![\w.)\]}])[+-])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3}(?!\w))?(?:/\d+)?"
    r"|(?:(?<![\w.)\]}])[+-])?(?<!\d)\.\d+"
)
_MAX_DIGITS = 4000  # Python refuses to read longer integers; they are compared as text


@dataclass(frozen=True, slots=True)
class ExactNumber:
    """A rational number; ``percent`` tells whether a per-cent sign followed it."""

    value: Fraction
    percent: bool = False

    def same_as(self, other: ExactNumber) -> bool:
        """Exact equality. Where one side alone has a per-cent sign, 50% is both 0.5 and 50."""
        if self.percent == other.percent:
            return self.value == other.value
        percent, plain = (self, other) if self.percent else (other, self)
        return plain.value in (percent.value, percent.value / 100)


def parse_number(text: str) -> ExactNumber | None:
    """The number that ``text`` is as a whole, or None."""
    text = text.strip()
    if len(text) > _MAX_DIGITS:
        return None
    if number := _NUMBER.fullmatch(text):
        value = Fraction(_plain(number["value"]))
        return ExactNumber(_signed(number["sign"], value), percent=bool(number["percent"]))
    fraction = _FRACTION.fullmatch(text) or _LATEX_FRACTION.fullmatch(text)
    return _ratio(fraction) if fraction else None


def last_number(text: str) -> ExactNumber | None:
    """The last number in ``text``; ``3/4`` written without spaces is one number, LaTeX fractions are not read."""
    for fragment in (r"\,", r"\!", "{,}"):
        text = re.sub(rf"(?<=\d){re.escape(fragment)}(?=\d\d\d)", ",", text)
    found = _IN_TEXT.findall(text)
    return parse_number(found[-1]) if found else None


def _ratio(fraction: re.Match[str]) -> ExactNumber | None:
    parts = fraction.groupdict()
    above = int(_plain(parts["above"] or parts["above1"]))
    below = int(_plain(parts["below"] or parts["below1"]))
    return ExactNumber(_signed(parts["sign"], Fraction(above, below))) if below else None


def _plain(digits: str) -> str:
    return digits.replace(",", "").replace(" ", "")


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value
